"""Granite 3: Llama with a factor on embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields
from model_zoo.llama import ALLOWED
from model_zoo.weights.gguf_metadata import Metadata


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "granite", ALLOWED)
    bias = f.flag("attention_bias")
    return f.decoder(
        dtype,
        max_len,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=f.flag("mlp_bias"),
        embed_scale=f.number("embedding_multiplier", 1.0),
        attention_scale=f.number("attention_multiplier", 1.0),
        residual_scale=f.number("residual_multiplier", 1.0),
        logit_scale=1.0 / f.number("logits_scaling", 1.0),
    )


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": meta.has("blk.0.attn_q.bias"),
        "mlp_bias": meta.has("blk.0.ffn_gate.bias"),
        "embedding_multiplier": meta.number("embedding_scale", 1.0),
        "attention_multiplier": meta.number("attention.scale", 1.0),
        "residual_multiplier": meta.number("residual_scale", 1.0),
        "logits_scaling": meta.number("logit_scale", 1.0),
    }


FAMILY = Family(
    model_type="granite",
    architectures=("GraniteForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.LLAMA,
    gguf=Gguf(_gguf_config, interleaved=True),
)
