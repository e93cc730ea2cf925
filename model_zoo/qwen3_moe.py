"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig, Moe
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields, experts
from model_zoo.weights.gguf_metadata import Metadata

ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "decoder_sparse_step": (1,),  # every layer has experts
    "mlp_only_layers": ([], None),
    "layer_types": (None,),
}
_EXPERT = f"mlp.experts.{names.EXPERT}"


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "qwen3_moe", ALLOWED)
    bias = f.flag("attention_bias")
    count = (
        "num_experts" if "num_experts" in hf else "num_local_experts"
    )  # transformers 5 writes it
    window = f.window(default=4096) if f.flag("use_sliding_window") else None
    return f.decoder(
        dtype,
        max_len,
        F=f.size("moe_intermediate_size"),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        windows=f.windows(window),
        moe=Moe(*experts(f, count), normalise=f.flag("norm_topk_prob")),
    )


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # GGUF leaves it out; so has every Qwen3-MoE (llama.cpp)
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.ATTENTION
    | names.PRE_NORMS
    | names.QK_NORMS
    | {
        "mlp.gate": "router",
        f"{_EXPERT}.gate_proj": "expert_gate",
        f"{_EXPERT}.up_proj": "expert_up",
        f"{_EXPERT}.down_proj": "expert_down",
    },
    gguf=Gguf(_gguf_config),
)
