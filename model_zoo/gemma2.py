"""Gemma 2: norms before and after, capped scores and logits, a window in every other layer."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields
from model_zoo.weights.gguf_metadata import Metadata

ALLOWED: dict[str, tuple[Any, ...]] = {"hidden_activation": ("gelu_pytorch_tanh",)}
NORMS = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "post1",
    "pre_feedforward_layernorm": "norm2",
    "post_feedforward_layernorm": "post2",
}


def common(f: Fields) -> dict[str, Any]:
    """The options that Gemma 2 and 3 share."""
    bias = f.flag("attention_bias")
    return {
        "activation": "gelu_tanh",
        "tie": f.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "out_bias": bias,
        "post_norms": True,
        "norm_offset": 1.0,
        "embed_scale": f.size("hidden_size") ** 0.5,
        "attention_scale": f.number("query_pre_attn_scalar", 256) ** -0.5,
    }


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "gemma2", ALLOWED)
    every_other = [layer % 2 == 0 for layer in range(f.size("num_hidden_layers"))]
    return f.decoder(
        dtype,
        max_len,
        H=f.size("head_dim", 256),
        windows=f.windows(f.window(default=4096), f.sliding(every_other)),
        attention_cap=f.cap("attn_logit_softcapping", 50.0),
        logit_cap=f.cap("final_logit_softcapping", 30.0),
        **common(f),
    )


def query_scalar(meta: Metadata, layers_of_27b: int) -> int:
    """GGUF leaves it out: the size of a head, but for the 27B model (llama.cpp goes by layers)."""
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    if meta.count("block_count") == layers_of_27b:
        return hidden // heads
    return meta.count("attention.key_length", hidden // heads)


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scalar(meta, 46),
        "sliding_window": meta.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
    }


FAMILY = Family(
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.ATTENTION | names.MLP | NORMS,
    gguf=Gguf(_gguf_config, norm_offset=1.0),
)
