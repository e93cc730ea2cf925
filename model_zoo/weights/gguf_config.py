"""GGUF metadata of a llama-architecture model -> the dict that its config.json would hold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from model_zoo.gguf_header import GGUFFile

_PLAIN_ROPE = (None, "none")
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # the only values that Meta's models and the converters use


def hf_config(file: GGUFFile, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The Hugging Face config of `file`.

    `factors`: the rope factor tensors of the file by name, f32[H/2] each.  Raises ValueError for
    what the llama architecture here cannot express.
    """
    meta = _Reader(file)
    _refuse_unsupported(meta)
    num_heads = meta.count("attention.head_count")
    hidden = meta.count("embedding_length")
    head_dim = meta.get("attention.key_length", hidden // num_heads)
    rotated = meta.get("rope.dimension_count", head_dim)
    if rotated != head_dim or meta.get("attention.value_length", head_dim) != head_dim:
        raise meta.fail(
            f"head sizes differ: key {head_dim}, rotated {rotated}, "
            f"value {meta.get('attention.value_length', head_dim)}"
        )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.count("feed_forward_length"),
        "num_hidden_layers": meta.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": _shortest(meta.get("attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": _shortest(meta.get("rope.freq_base", 10_000.0)),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
    }
    scaling = _rope_scaling(meta, factors, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config | _special_tokens(file.metadata)


class _Reader:
    """Metadata under the architecture's prefix."""

    def __init__(self, file: GGUFFile):
        self.file = file

    def fail(self, reason: str) -> ValueError:
        return ValueError(f"{self.file.path}: {reason}; this GGUF model is not supported")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"llama.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; an array of equal ones (one a layer) counts as one."""
        value = self.get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if not isinstance(value, int) or value <= 0:
            raise self.fail(f"metadata llama.{key} is {value!r}, not one positive number")
        return value


def _refuse_unsupported(meta: _Reader) -> None:
    metadata = meta.file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise meta.fail(f"general.architecture is {architecture!r}, only 'llama' is supported")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{meta.file.path} is one part of a split GGUF; join the parts first "
            f"(llama-gguf-split --merge)"
        )
    if meta.get("expert_count", 0):
        raise meta.fail(f"it is a mixture of {meta.get('expert_count')} experts")
    if meta.get("attention.sliding_window", 0):
        raise meta.fail(f"it has a sliding window of {meta.get('attention.sliding_window')}")
    if "token_embd.weight" not in meta.file.tensors:
        raise meta.fail("tensor token_embd.weight is missing")


def _rope_scaling(
    meta: _Reader, factors: Mapping[str, np.ndarray], config: Mapping[str, Any]
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


def _yarn(meta: _Reader, factor: float | None) -> dict[str, Any]:
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


def _longrope(meta: _Reader, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if not all(name in factors for name in names):
        raise meta.fail(f"longrope needs the tensors {' and '.join(names)}")
    return {
        "rope_type": "longrope",
        "short_factor": _floats(factors[names[0]]),
        "long_factor": _floats(factors[names[1]]),
        "original_max_position_embeddings": meta.count("rope.scaling.original_context_length"),
        "attention_factor": _shortest(meta.get("rope.scaling.attn_factor", 1.0)),
    }


def _from_factors(factors: np.ndarray, config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling whose frequencies are theta**(-2i/H) / factors[i].

    Llama 3 files carry their scaling only as this tensor.  What is not llama3 with the usual
    values is written as longrope with one set of factors, which says exactly the same.
    """
    scaling = {"rope_type": "llama3", "factor": _shortest(float(factors.max()))} | LLAMA3
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


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _floats(values: Sequence[float] | np.ndarray) -> list[float]:
    return [_shortest(value) for value in values]
