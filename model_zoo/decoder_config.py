"""The options in which decoder-only families differ, as one frozen value."""

import dataclasses
from typing import Literal

from model_zoo.kv_layout import KVLayout, kv_layout
from model_zoo.rope import Rope

Activation = Literal["silu", "gelu_tanh"]
QKNorm = Literal["none", "head", "all"]  # over each head's H, or over all heads of q (of k) at once


@dataclasses.dataclass(frozen=True)
class Moe:
    """A mixture of experts in place of the MLP of every layer; F is the size of one expert."""

    experts: int
    top_k: int  # experts a token uses
    normalise: bool  # the weights of a token's experts add up to 1


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes by their glossary letter, and the options of a family."""

    L: int
    D: int
    F: int
    N: int
    K: int
    H: int
    V: int
    ropes: tuple[Rope, ...]  # all with the same number of rotated pairs
    layer_ropes: tuple[int, ...] = ()  # which of `ropes` each layer has; (): the first, everywhere
    windows: tuple[int | None, ...] = ()  # positions each layer sees, None for all; (): all
    eps: float = 1e-5
    activation: Activation = "silu"
    tie: bool = False  # the head is the embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    pre_norms: bool = True  # before attention and MLP
    post_norms: bool = False  # after them, before the residual is added
    norm_offset: float = 0.0  # a norm multiplies by offset + weight
    moe: Moe | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    attention_scale: float | None = None  # of q . k; None is H ** -0.5
    attention_cap: float | None = None  # cap * tanh(scores / cap)
    logit_scale: float = 1.0
    logit_cap: float | None = None
    max_position: int = 2048  # tokens the model was trained for
    longest: int = 2048  # tokens it can be served for when the config asks; see `rope.longest`
    dtype: str = "float32"
    int8: bool = False  # matrices are int8 with a scale a row, but not the router

    @property
    def kv_layout(self) -> KVLayout:
        """Groups of layers with a block table each, and where the KV of each layer lies."""
        return kv_layout(self.L, self.windows)

    def served(self, max_len: int) -> "DecoderConfig":
        """As it is for requests of at most `max_len` tokens: a window that holds them all is
        none."""
        windows = tuple(w if w is not None and w < max_len else None for w in self.windows)
        return dataclasses.replace(self, windows=windows if any(windows) else ())
