"""Tiny random models: one for each option of the architecture, as Hugging Face config dicts.

Weights come from numpy's legacy generator, whose stream is frozen for good, so that a seed is as
good as a file.
"""

import zlib
from typing import Any

import numpy as np

VOCAB = 64

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.3, 1.9, 2.8, 4.1, 5.5, 7.0, 8.0],
}


def _with(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (_BASE | changes).items() if value is not ...}


# `...` removes a key: configs in the wild leave out what has a default.
CONFIGS: dict[str, dict[str, Any]] = {
    "gqa_9_3": _with(
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=...,
        rope_theta=100000.0,
    ),
    "mha": _with(num_key_value_heads=..., head_dim=...),
    "mqa": _with(num_key_value_heads=1),
    "wide_heads": _with(head_dim=32),  # N * H is not D
    "untied": _with(tie_word_embeddings=False),
    "attention_bias": _with(attention_bias=True),
    "all_biases": _with(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "mistral": _with(
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        attention_bias=...,
        mlp_bias=...,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "rope_linear": _with(rope_scaling={"type": "linear", "factor": 4.0}),
    "rope_dynamic": _with(
        rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=32
    ),
    "rope_llama3": _with(rope_scaling=_LLAMA3, rope_theta=500000.0),
    "rope_llama3_factor32": _with(rope_scaling=_LLAMA3 | {"factor": 32.0}),
    "rope_yarn": _with(rope_scaling=_YARN),
    "rope_yarn_betas": _with(
        rope_scaling=_YARN
        | {"factor": 16.0, "beta_fast": 16, "beta_slow": 0.5, "attention_factor": 0.9}
    ),
    "rope_yarn_mscale": _with(
        rope_scaling=_YARN
        | {"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
    ),
    "rope_longrope": _with(rope_scaling=_LONGROPE),
    "rope_longrope_factor": _with(
        rope_scaling=_LONGROPE | {"factor": 4.0, "attention_factor": 1.1}
    ),
    "rope_parameters": _with(  # how transformers 5 writes it
        rope_scaling=..., rope_theta=..., rope_parameters=_LLAMA3 | {"rope_theta": 20000.0}
    ),
}

LENGTHS = (5, 100)  # tokens of the committed prompts: within and beyond the original context of 32


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint; linear weights are [out, in]."""
    D, F, N = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    K = config.get("num_key_value_heads") or N
    H = config.get("head_dim") or D // N
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], D)}
    linear = {
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.o_proj": (D, N * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (D,)
        for name, shape in linear.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if config.get("mlp_bias" if name.startswith("mlp") else "attention_bias"):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (D,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], D)
    return shapes


def make_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random float32 weights whose logits spread over a few units, with attention that looks far
    back.

    Layers outweigh the embedding in the residual stream, or a tied head would repeat the last token
    for ever.
    """
    weights = {}
    for name, shape in tensor_shapes(config).items():
        generator = np.random.RandomState((seed + zlib.crc32(name.encode())) % 2**32)
        noise = generator.standard_normal(shape)
        if "norm" in name:
            values = (2.0 if name == "model.norm.weight" else 1.0) * (1 + 0.2 * noise)
        elif name.endswith("bias"):
            values = 0.3 * noise
        elif "embed" in name or "lm_head" in name:
            values = 0.2 * noise
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 2.0
            values = noise * gain / shape[1] ** 0.5
        weights[name] = values.astype(np.float32)
    return weights


def make_prompt(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    """Random ids in [3, vocab): never a special token of the tiny configs."""
    return np.random.RandomState(seed).randint(3, vocab, length).tolist()
