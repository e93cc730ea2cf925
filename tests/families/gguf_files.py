"""The committed checkpoints as GGUF, written as convert_hf_to_gguf.py of llama.cpp does, with the
`gguf` package's own writer and name maps."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from model_zoo.checkpoint import Checkpoint
from tests.models.weight_files import permute

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "phi3_window": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
}


def write(path: Path, name: str, checkpoint: Checkpoint) -> Path:
    hf, architecture = checkpoint.hf_config, ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = hf["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    _MORE.get(name.partition("_window")[0], lambda writer, hf: None)(writer, hf)
    if name != "qwen2" and hf.get("sliding_window"):
        writer.add_sliding_window(hf["sliding_window"])
    names = gguf.get_tensor_name_map(architecture, hf["num_hidden_layers"])
    turned = (
        {"q_proj": heads, "k_proj": kv_heads} if name in ("llama", "mixtral", "granite") else {}
    )
    for tensor, array in _merged(checkpoint).items():
        array = array.astype(np.float32)
        layer = tensor.split(".")[-2]
        if layer in turned:
            array = permute(array, turned[layer])
        if name.startswith("gemma") and tensor.endswith("norm.weight"):
            array = array + 1
        theirs = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, tensor
        writer.add_tensor(theirs, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _merged(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Tensors by the names that the converter looks up: the experts of a layer are one tensor."""
    found: dict[str, Any] = {}
    for name, array in checkpoint.tensors():
        before, dot, after = name.partition(".experts.")
        if not dot:
            found[name] = array
            continue
        expert, _, rest = after.partition(".")
        found.setdefault(f"{before}.experts.{rest}", {})[int(expert)] = array
    return {
        name: value
        if isinstance(value, np.ndarray)
        else np.stack([value[e] for e in sorted(value)])
        for name, value in found.items()
    }


def _moe(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    writer.add_expert_count(hf["num_local_experts"])
    writer.add_expert_used_count(hf["num_experts_per_tok"])
    if "moe_intermediate_size" in hf:
        writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])


def _gemma2(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    writer.add_attn_logit_softcapping(hf["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(hf["final_logit_softcapping"])


def _gemma3(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    rope = hf["rope_parameters"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
    writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    writer.add_array(
        "gemma3.attention.sliding_window_pattern",
        [kind == "sliding_attention" for kind in hf["layer_types"]],
    )


def _phi3(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    rope = hf["rope_parameters"]
    if rope["rope_type"] != "longrope":
        return
    original = hf["original_max_position_embeddings"]
    factor = hf["max_position_embeddings"] / original
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(original))))
    for kind in ("long", "short"):
        factors = np.array(rope[f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _granite(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    writer.add_embedding_scale(hf["embedding_multiplier"])
    writer.add_attention_scale(hf["attention_multiplier"])
    writer.add_residual_scale(hf["residual_multiplier"])
    writer.add_logit_scale(hf["logits_scaling"])


_MORE: dict[str, Callable[[gguf.GGUFWriter, Mapping[str, Any]], None]] = {
    "mixtral": _moe,
    "qwen3_moe": _moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
}
