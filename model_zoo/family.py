"""What a family file says about its models; everything outside `model_zoo` sees only this."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from model_zoo import names as tensor_names
from model_zoo.checkpoint import Place
from model_zoo.decoder import Decoder
from model_zoo.decoder_config import DecoderConfig
from model_zoo.weights.gguf_metadata import Metadata


@dataclasses.dataclass(frozen=True)
class Gguf:
    """How llama.cpp stores the family."""

    config: Callable[[Metadata], dict[str, Any]]  # config.json entries beside the sizes and rope
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # unlike names.GGUF_LAYER
    interleaved: bool = False  # rows of q and k: the halves of a head's rotary pairs alternate
    norm_offset: float = 0.0  # added to the weights of all norms
    partial_rope: bool = False  # some dimensions of a head may not be rotated


@dataclasses.dataclass(frozen=True)
class Family:
    """One model_type: config, module, names."""

    model_type: str
    architectures: tuple[str, ...]  # classes of transformers whose weights these are
    config_from_hf: Callable[..., DecoderConfig]
    """(contents of config.json, *, dtype, max_len) -> config; ValueError names what is not
    supported.  `max_len` is the longest request that will be served (see `rope.from_hf`); 0: what
    the model was trained for.
    """
    names: Mapping[str, str]  # Hugging Face tensor name within a layer -> part
    gguf: Gguf | None = None
    own_code: tuple[str, ...] = ()
    """Classes of an `auto_map` whose code is that of transformers; any other is refused."""
    module: Callable[..., Any] = Decoder  # nnx module: module(config, rngs)

    def places(self, config: DecoderConfig) -> dict[str, Place]:
        """Where each tensor of a Hugging Face checkpoint goes."""
        return tensor_names.places(config, self.names)

    def from_gguf(self, name: str) -> tensor_names.GgufName | None:
        """The Hugging Face name of a GGUF tensor; None when the family has no such tensor."""
        return tensor_names.from_gguf(name, self.names, self.gguf.names if self.gguf else {})
