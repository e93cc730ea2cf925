"""What a checkpoint is, in figures, from its headers alone."""

import collections
import math
from typing import Any

from model_zoo import registry
from model_zoo.checkpoint import Checkpoint

_BYTES = {"float32": 4, "bfloat16": 2}


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sizes of a model by name; parameters are counted as stored, a tied head once."""
    config = checkpoint.hf_config
    heads = config.get("num_attention_heads", 0)
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // max(heads, 1)
    layers = config.get("num_hidden_layers", 0)
    values: collections.Counter[str] = collections.Counter()
    for info in checkpoint.infos.values():
        values[info.stored] += math.prod(info.shape)
    kv_values = 2 * layers * kv_heads * head_dim
    model_type = config.get("model_type")
    return {
        "path": checkpoint.path,
        "model_type": model_type,
        "supported": model_type in registry.known(),
        "parameters": sum(values.values()),
        "stored": dict(values.most_common()),  # values by type in the file
        "layers": layers,
        "hidden_size": config.get("hidden_size"),
        "mlp_size": config.get("intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": config.get("vocab_size"),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "context_length": config.get("max_position_embeddings"),
        "rope": rope(config),
        "kv_bytes_per_token": {name: kv_values * size for name, size in _BYTES.items()},
    }


def rope(config: dict[str, Any]) -> dict[str, Any]:
    """Type, theta and parameters of the rotary embedding (transformers 4 or 5 style config)."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = given.pop("rope_type", given.pop("type", None)) or "default"
    theta = given.pop("rope_theta", config.get("rope_theta", 10_000.0))
    return {"type": kind, "theta": theta, **given}
