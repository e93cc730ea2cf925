"""Gemma 3, text: five layers with a window and a rope base of their own, then a full one."""

from collections.abc import Mapping
from typing import Any

from model_zoo import gemma2, names, rope
from model_zoo.decoder_config import DecoderConfig
from model_zoo.family import Family, Gguf
from model_zoo.hf_config import Fields
from model_zoo.weights.gguf_metadata import Metadata

_PATTERN = 6  # layers from one full layer to the next
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def config_from_hf(
    hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
) -> DecoderConfig:
    f = Fields(hf, "gemma3_text", gemma2.ALLOWED)
    pattern = f.size("sliding_window_pattern", _PATTERN)
    sliding = f.sliding([(layer + 1) % pattern > 0 for layer in range(f.size("num_hidden_layers"))])
    head_dim = f.size("head_dim", 256)
    return f.decoder(
        dtype,
        max_len,
        H=head_dim,
        ropes=tuple(
            rope.from_hf(values, head_dim=head_dim, max_len=max_len) for values in _ropes(hf)
        ),
        layer_ropes=tuple(int(slides) for slides in sliding),
        windows=f.windows(f.window(default=4096), sliding),
        qk_norm="head",
        attention_cap=f.cap("attn_logit_softcapping"),
        logit_cap=f.cap("final_logit_softcapping"),
        **gemma2.common(f),
    )


def _ropes(hf: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configs of two models, one with the rope of the full layers, one with that of the others."""
    length = {"max_position_embeddings": hf.get("max_position_embeddings")}
    given = hf.get("rope_parameters")
    if isinstance(given, dict) and given.keys() & {"full_attention", "sliding_attention"}:
        full, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
        return (
            length | {"rope_theta": _THETA, "rope_parameters": full},
            length | {"rope_theta": _LOCAL_THETA, "rope_parameters": local},
        )
    return (
        length
        | {name: hf.get(name) for name in ("rope_scaling", "rope_parameters")}
        | {"rope_theta": hf.get("rope_theta") or _THETA},
        length | {"rope_theta": hf.get("rope_local_base_freq") or _LOCAL_THETA},
    )


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    found = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": gemma2.query_scalar(meta, 62),
        "sliding_window": meta.count("attention.sliding_window", 1024),
        "rope_theta": meta.number("rope.freq_base", _THETA),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", _LOCAL_THETA),
        "sliding_window_pattern": _PATTERN,
    }
    pattern = meta.get("attention.sliding_window_pattern", _PATTERN)
    if isinstance(pattern, list):  # one flag a layer
        names = {True: "sliding_attention", False: "full_attention"}
        return found | {"layer_types": [names[bool(slides)] for slides in pattern]}
    return found | {"sliding_window_pattern": pattern}


FAMILY = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    config_from_hf=config_from_hf,
    names=names.ATTENTION | names.MLP | names.QK_NORMS | gemma2.NORMS,
    gguf=Gguf(_gguf_config, norm_offset=1.0),
)
