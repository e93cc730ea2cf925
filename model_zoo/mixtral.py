"""Mixtral: Mistral with a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig, Moe
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields, experts
from model_zoo.mistral import ALLOWED
from model_zoo.weights.gguf_metadata import Metadata

_EXPERT = f"block_sparse_moe.experts.{names.EXPERT}"


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "mixtral", ALLOWED)
    return f.decoder(
        dtype,
        max_len,
        eps=f.number("rms_norm_eps", 1e-5),
        windows=f.windows(f.window()),
        moe=Moe(*experts(f, "num_local_experts"), normalise=True),
    )


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
    }


FAMILY = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.ATTENTION
    | names.PRE_NORMS
    | {
        "block_sparse_moe.gate": "router",
        f"{_EXPERT}.w1": "expert_gate",
        f"{_EXPERT}.w3": "expert_up",
        f"{_EXPERT}.w2": "expert_down",
    },
    gguf=Gguf(_gguf_config, interleaved=True),
)
