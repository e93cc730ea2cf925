"""Small random models as files of every format, written independently of the product's readers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from tests.reference import tiny

CONFIG = tiny.CONFIGS["gqa_9_3"] | {"head_dim": 8}
BIG = CONFIG | {  # every row is a multiple of 256 values, as the K types of GGUF need
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
Weights = dict[str, np.ndarray]

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_folder(
    folder: Path, config: Mapping[str, Any], weights: Weights, shards: int = 1
) -> Path:
    """A Hugging Face folder, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def gguf_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"
    return f"{_GGUF_NAMES[base]}.{kind}"


def tokenizer_metadata() -> dict[str, Any]:
    """A byte-level tokenizer of single characters."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u0120", "ab", *letters],
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1] + [1] * len(letters),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As the llama converter of llama.cpp does (LlamaModel.permute)."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],  # HF names; u8 rows of blocks when quantised
    kind: gguf.GGMLQuantizationType | None = None,  # of the u8 arrays
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,  # GGUF names
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    for name, array in weights.items():
        layer = name.split(".")[-2]
        array = permute(array, heads[layer]) if layer in heads else array
        raw_dtype = kind if array.dtype == np.uint8 else None
        if array.dtype.name == "bfloat16":
            array, raw_dtype = array.view(np.uint8), gguf.GGMLQuantizationType.BF16
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array), raw_dtype=raw_dtype)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def params(module: Any) -> Weights:
    """Every parameter of a loaded module by dotted path."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in flat}


def expected_params(config: Mapping[str, Any], weights: Weights) -> Weights:
    """What a llama module must hold, put together by hand."""
    layers = range(config["num_hidden_layers"])

    def stack(*names: str, kind: str = "weight") -> np.ndarray:
        parts = [[weights[f"model.layers.{i}.{name}.{kind}"] for name in names] for i in layers]
        return np.stack([np.concatenate(part, axis=0) for part in parts])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    found = {
        "embed": weights["model.embed_tokens.weight"],
        "norm": weights["model.norm.weight"],
        "layers.norm1": stack("input_layernorm"),
        "layers.norm2": stack("post_attention_layernorm"),
        "layers.qkv": stack(*qkv),
        "layers.out": stack("self_attn.o_proj"),
        "layers.gate_up": stack("mlp.gate_proj", "mlp.up_proj"),
        "layers.down": stack("mlp.down_proj"),
    }
    if not config.get("tie_word_embeddings"):
        found["head"] = weights["lm_head.weight"]
    if config.get("attention_bias"):
        found["layers.qkv_bias"] = stack(*qkv, kind="bias")
        found["layers.out_bias"] = stack("self_attn.o_proj", kind="bias")
    if config.get("mlp_bias"):
        found["layers.gate_up_bias"] = stack("mlp.gate_proj", "mlp.up_proj", kind="bias")
        found["layers.down_bias"] = stack("mlp.down_proj", kind="bias")
    return found


def assert_same_params(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
