"""Qwen3: a norm over each head of q and k."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields
from model_zoo.qwen2 import ALLOWED, windows


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "qwen3", ALLOWED)
    bias = f.flag("attention_bias")
    return f.decoder(
        dtype,
        max_len,
        H=f.size("head_dim", 128),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        windows=windows(f),
    )


FAMILY = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.LLAMA | names.QK_NORMS,
    gguf=Gguf(lambda meta: {}),
)
