"""Llama 2 and 3, SmolLM2, TinyLlama."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields
from model_zoo.weights.gguf_metadata import Metadata

ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "llama", ALLOWED)
    bias = f.flag("attention_bias")
    return f.decoder(dtype, max_len, qkv_bias=bias, out_bias=bias, mlp_bias=f.flag("mlp_bias"))


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    if meta.get("attention.sliding_window", 0):
        raise meta.fail(f"it has a sliding window of {meta.get('attention.sliding_window')}")
    return {
        "attention_bias": meta.has("blk.0.attn_q.bias"),
        "mlp_bias": meta.has("blk.0.ffn_gate.bias"),
    }


FAMILY = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.LLAMA,
    gguf=Gguf(_gguf_config, interleaved=True),
)
