"""Phi-3, Phi-3.5 and Phi-4: q, k and v are one tensor, gate and up another; longrope."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields
from model_zoo.weights.gguf_metadata import Metadata

ALLOWED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_OLD_NAMES = ("su", "yarn")  # what early files call longrope


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    scaling = hf.get("rope_scaling")
    if isinstance(scaling, dict) and (scaling.get("type") in _OLD_NAMES):
        hf = {**hf, "rope_scaling": {**scaling, "type": "longrope"}}
    f = Fields(hf, "phi3", ALLOWED)
    return f.decoder(
        dtype, max_len, eps=f.number("rms_norm_eps", 1e-5), windows=f.windows(f.window())
    )


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    window = meta.get("attention.sliding_window", 0)
    return {"sliding_window": meta.count("attention.sliding_window") if window else None}


FAMILY = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    config_from_hf=config_from_hf,
    names={
        "self_attn.qkv_proj": "qkv",
        "self_attn.o_proj": "out",
        "mlp.gate_up_proj": "gate_up",
        "mlp.down_proj": "down",
    }
    | names.PRE_NORMS,
    gguf=Gguf(_gguf_config, names={"ffn_up": "gate_up"}, partial_rope=True),
    own_code=(
        "configuration_phi3.Phi3Config",
        "modeling_phi3.Phi3ForCausalLM",
    ),
)
