"""OLMo 2: a norm after attention and MLP instead of before, and one over all heads of q and k."""

from collections.abc import Mapping
from typing import Any

from model_zoo import names
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields

ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "layer_types": (None,),
}


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "olmo2", ALLOWED)
    bias = f.flag("attention_bias")
    return f.decoder(
        dtype,
        max_len,
        eps=f.number("rms_norm_eps", 1e-5),
        pre_norms=False,
        post_norms=True,
        qk_norm="all",
        qkv_bias=bias,
        out_bias=bias,
    )


FAMILY = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.ATTENTION
    | names.MLP
    | names.QK_NORMS
    | {"post_attention_layernorm": "post1", "post_feedforward_layernorm": "post2"},
    gguf=Gguf(lambda meta: {}),
)
