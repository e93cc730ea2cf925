"""Qwen2 and Qwen2.5: q, k and v have a bias; some sizes have a window in their upper layers."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields

ALLOWED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}


def windows(f: Fields) -> tuple[int | None, ...]:
    """The window of layers from `max_window_layers` on, where it is in use at all."""
    if not f.flag("use_sliding_window"):
        return ()
    window = f.window(default=4096)
    first = f.hf.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(f"config.json: max_window_layers must be a number, it is {first!r}")
    upper = [layer >= first for layer in range(f.size("num_hidden_layers"))]
    return f.windows(window, f.sliding(upper))


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "qwen2", ALLOWED)
    return f.decoder(dtype, max_len, qkv_bias=True, windows=windows(f))


FAMILY = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.LLAMA,
    gguf=Gguf(lambda meta: {}),
)
