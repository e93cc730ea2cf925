"""The weights of a GGUF file under their Hugging Face names, for tools/make_references.py.

Nothing here is the product's: what its loader gets wrong is not repeated.
"""

from pathlib import Path
from typing import Any

import numpy as np

_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config of transformers and the dequantised float32 weights of a llama or gemma3 file."""
    import gguf

    reader = gguf.GGUFReader(path)
    family = reader.fields["general.architecture"].contents()

    def value(key: str) -> Any:
        return reader.fields[f"{family}.{key}"].contents()

    config = {
        "model_type": "llama",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": round(value("attention.layer_norm_rms_epsilon"), 12),
        "tie_word_embeddings": True,
    }
    if family == "gemma3":
        config |= _gemma3(value)
    else:
        config["rope_theta"] = value("rope.freq_base")
    weights = {}
    for tensor in reader.tensors:
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if family == "gemma3":
            array = array - 1 if "norm" in tensor.name else array  # the file's norms hold 1 + w
        elif tensor.name.endswith("attn_q.weight"):
            array = unpermute(array, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            array = unpermute(array, config["num_key_value_heads"])
        weights[hf_name(tensor.name, family)] = array
    config["vocab_size"] = len(weights["model.embed_tokens.weight"])
    return config, weights


def _gemma3(value: Any) -> dict[str, Any]:
    """What google/gemma-3-270m's config.json says, of which a GGUF file has a part."""
    layers = range(value("block_count"))
    rope = {"full_attention": value("rope.freq_base"), "sliding_attention": 10_000.0}
    return {
        "model_type": "gemma3_text",
        "head_dim": value("attention.key_length"),
        "query_pre_attn_scalar": value("attention.key_length"),
        "sliding_window": value("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in layers
        ],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in rope.items()
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the rotary pair (i, i + H / 2) of a head in rows 2i and 2i + 1; put them back."""
    head_dim = weight.shape[0] // heads
    by_head = weight.reshape(heads, head_dim, -1)
    return np.concatenate((by_head[:, 0::2], by_head[:, 1::2]), axis=1).reshape(weight.shape)


def hf_name(name: str, family: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name in _TOP:
        return _TOP[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{(_PARTS | _NORMS[family])[part]}.{kind}"
