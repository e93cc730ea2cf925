"""Mistral 7B and what has its shape; before v0.2 every layer has a window of 4096."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family
from model_zoo.hf_config import Fields

ALLOWED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "layer_types": (None,)}


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "mistral", ALLOWED)
    window = f.window(default=4096)  # transformers' own where a config is silent
    return f.decoder(dtype, max_len, windows=f.windows(window))


FAMILY = Family(  # as GGUF it is of the llama architecture
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.LLAMA,
)
