"""GGUF metadata -> the dict that config.json would hold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from model_zoo import registry
from model_zoo.weights.gguf_header import GGUFFile
from model_zoo.weights.gguf_metadata import Metadata, shortest

_PLAIN_ROPE = (None, "none")
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # the only values that Meta's models and the converters use


def hf_config(file: GGUFFile, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The Hugging Face config of `file`.

    `factors`: the rope factor tensors of the file by name, f32[pairs] each.  Raises ValueError for
    what no family here can express.
    """
    meta, family = _family(file)
    num_heads = meta.count("attention.head_count")
    hidden = meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", max(hidden // num_heads, 1))
    rotated = meta.count("rope.dimension_count", head_dim)
    value_dim = meta.count("attention.value_length", head_dim)
    if value_dim != head_dim or (rotated != head_dim and not family.gguf.partial_rope):
        raise meta.fail(f"head sizes differ: key {head_dim}, rotated {rotated}, value {value_dim}")
    config: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.count(
            "feed_forward_length", meta.get("expert_feed_forward_length")
        ),
        "num_hidden_layers": meta.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": meta.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": not meta.has("output.weight"),
        "torch_dtype": "float32",
    }
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _rope_scaling(meta, factors, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config | family.gguf.config(meta) | _special_tokens(file.metadata)


def _family(file: GGUFFile) -> tuple[Metadata, Any]:
    """The metadata under its prefix, and the family that runs it."""
    name = file.metadata.get("general.architecture")
    meta = Metadata(file, str(name))
    model_type = registry.gguf_model_type(name, bool(meta.get("expert_count", 0)))
    if not model_type:
        raise meta.fail(
            f"general.architecture is {name!r}{' with experts' if meta.get('expert_count') else ''}"
            f", supported: {', '.join(registry.gguf_known())}"
        )
    if file.metadata.get("split.count", 1) != 1:
        raise ValueError(
            f"{file.path} is one part of a split GGUF; join the parts first "
            f"(llama-gguf-split --merge)"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise meta.fail("tensor token_embd.weight is missing, or no matrix")
    return meta, registry.family(model_type)


def _rope_scaling(
    meta: Metadata, factors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The rope_scaling entry of config.json; None for plain rope."""
    kind = meta.get("rope.scaling.type")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear"))
    if "rope_freqs.weight" in factors:
        if kind not in _PLAIN_ROPE:
            raise meta.fail(f"rope scaling {kind!r} together with a rope_freqs tensor")
        return _from_factors(factors["rope_freqs.weight"], config)
    if kind == "longrope" or "rope_factors_long.weight" in factors:
        return _longrope(meta, factors)
    if kind == "yarn":
        return _yarn(meta, factor)
    if kind == "linear" or (kind is None and factor is not None):
        return None if factor in (None, 0, 1) else {"rope_type": "linear", "factor": float(factor)}
    if kind not in _PLAIN_ROPE:
        raise meta.fail(f"rope scaling {kind!r} is unknown")
    return None


def _yarn(meta: Metadata, factor: float | None) -> dict[str, Any]:
    if not factor or meta.get("rope.scaling.yarn_log_multiplier"):
        raise meta.fail("yarn rope scaling without a factor or with a log multiplier")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": meta.count("rope.scaling.original_context_length"),
    }
    attention = meta.get("rope.scaling.attn_factor", 1.0)
    if attention != 1.0:  # multiplies the default attention factor of the YaRN paper, section 3.4
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if meta.get(f"rope.scaling.{key}") is not None:
            scaling[ours] = meta.get(f"rope.scaling.{key}")
    return scaling


def _longrope(meta: Metadata, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if not all(name in factors for name in names):
        raise meta.fail(f"longrope needs the tensors {' and '.join(names)}")
    return {
        "rope_type": "longrope",
        "short_factor": _floats(factors[names[0]]),
        "long_factor": _floats(factors[names[1]]),
        "original_max_position_embeddings": meta.count("rope.scaling.original_context_length"),
        "attention_factor": shortest(meta.get("rope.scaling.attn_factor", 1.0)),
    }


def _from_factors(factors: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling whose frequencies are theta**(-2i/H) / factors[i].

    Llama 3 files carry their scaling only as this tensor.  What is not llama3 with the usual
    values is written as longrope with one set of factors, which says exactly the same.
    """
    scaling = {"rope_type": "llama3", "factor": shortest(float(factors.max()))} | LLAMA3
    if np.allclose(factors, llama3_factors(config, scaling), rtol=1e-5, atol=0):
        return scaling
    return {
        "rope_type": "longrope",
        "short_factor": _floats(factors),
        "long_factor": _floats(factors),
        "original_max_position_embeddings": config["max_position_embeddings"],
        "attention_factor": 1.0,
    }


def llama3_factors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> np.ndarray:
    """f64[H/2]: by how much llama3 scaling divides each frequency (Llama 3.1 model card code)."""
    head_dim = config["head_dim"]
    frequencies = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    return {ours: metadata[key] for ours, key in names.items() if key in metadata}


def _floats(values: Sequence[float] | np.ndarray) -> list[float]:
    return [shortest(value) for value in values]
