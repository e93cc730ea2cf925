"""Checkpoint names: which part of which parameter a tensor is, in one word, for every format.

A family says which of its tensor names is which *part* ("q", "gate", "norm1", ...); what the parts
mean is the same for all.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from model_zoo.checkpoint import Place
from model_zoo.decoder_config import DecoderConfig
from model_zoo.parameters import shapes

TOP = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
ATTENTION = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "out",
}
MLP = {"mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
PRE_NORMS = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
QK_NORMS = {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
LLAMA = ATTENTION | MLP | PRE_NORMS

GGUF_TOP = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
GGUF_LAYER = {  # ggml-org/llama.cpp names one thing alike in all architectures
    "attn_norm": "norm1",
    "ffn_norm": "norm2",
    "post_attention_norm": "post1",
    "post_ffw_norm": "post2",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "qkv",
    "attn_output": "out",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "ffn_gate_inp": "router",
    "ffn_gate_exps": "expert_gate",
    "ffn_up_exps": "expert_up",
    "ffn_down_exps": "expert_down",
}
EXPERT = "{expert}"  # stands for the expert's number in a name
NORMS = frozenset({"norm", "norm1", "norm2", "post1", "post2", "q_norm", "k_norm"})


def places(c: DecoderConfig, names: Mapping[str, str]) -> dict[str, Place]:
    """Where each tensor of a Hugging Face checkpoint goes; `names`: those within a layer."""
    params = shapes(c)
    found = {f"{name}.weight": Place(path) for name, path in TOP.items() if path in params}
    parts = _parts(c)
    for name, part in names.items():
        param, where = parts[part]
        if f"layers.{param}" not in params:
            raise ValueError(f"{name} is {part!r}, which this model does not have")
        for layer in range(c.L):
            for full, index in _each(c, f"model.layers.{layer}.{name}", layer, where):
                found[f"{full}.weight"] = Place(f"layers.{param}", index)
                if f"layers.{param}_bias" in params:
                    found[f"{full}.bias"] = Place(f"layers.{param}_bias", index)
    return found


def _parts(c: DecoderConfig) -> dict[str, tuple[str, tuple[slice, ...]]]:
    """Each part's parameter, and which of its outputs it is."""
    q, k, v = c.N * c.H, (c.N + c.K) * c.H, (c.N + 2 * c.K) * c.H
    gate, up, down = slice(0, c.F), slice(c.F, 2 * c.F), slice(0, c.D)
    whole = {name: (name, ()) for name in (*NORMS, "router")}
    return whole | {
        "q": ("qkv", (slice(0, q),)),
        "k": ("qkv", (slice(q, k),)),
        "v": ("qkv", (slice(k, v),)),
        "qkv": ("qkv", (slice(0, v),)),
        "out": ("out", (down,)),
        "gate": ("gate_up", (gate,)),
        "up": ("gate_up", (up,)),
        "gate_up": ("gate_up", (slice(0, 2 * c.F),)),
        "down": ("down", (down,)),
        "expert_gate": ("gate_up", (gate,)),
        "expert_up": ("gate_up", (up,)),
        "expert_down": ("down", (down,)),
    }


def _each(
    c: DecoderConfig, name: str, layer: int, where: tuple[slice, ...]
) -> Iterator[tuple[str, tuple[int | slice, ...]]]:
    """One tensor of a layer, or one for each expert."""
    if EXPERT not in name:
        yield name, (layer, *where)
        return
    for expert in range(c.moe.experts if c.moe else 0):
        yield name.replace(EXPERT, str(expert)), (layer, expert, *where)


class GgufName(NamedTuple):
    """A GGUF tensor under its Hugging Face name."""

    name: str  # of all experts, with `EXPERT` in it: in GGUF they are one tensor
    part: str
    kind: str  # weight or bias

    @property
    def of_experts(self) -> bool:
        return EXPERT in self.name

    @property
    def of_norm(self) -> bool:
        return self.part in NORMS and self.kind == "weight"

    def expert(self, number: int) -> str:
        return self.name.replace(EXPERT, str(number))


def from_gguf(name: str, names: Mapping[str, str], other: Mapping[str, str]) -> GgufName | None:
    """None for a tensor that the family does not have.

    `names`: Hugging Face names within a layer; `other`: where GGUF names differ from `GGUF_LAYER`.
    """
    match = re.fullmatch(r"(?:blk\.(\d{1,5})\.)?([a-z_]+)\.(weight|bias)", name)
    if not match:
        return None
    layer, base, kind = match.groups()
    part = GGUF_TOP.get(base) if layer is None else (GGUF_LAYER | dict(other)).get(base)
    ours = {part: name for name, part in (TOP if layer is None else names).items()}
    if part is None or part not in ours:
        return None
    prefix = "" if layer is None else f"model.layers.{layer}."
    return GgufName(f"{prefix}{ours[part]}.{kind}", part, kind)
