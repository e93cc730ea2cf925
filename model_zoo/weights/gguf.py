"""GGUF files of the llama architecture, under Hugging Face names and row order."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from model_zoo.checkpoint import Checkpoint, TensorInfo
from model_zoo.gguf_header import GGUFFile, GGUFTensor, read_gguf
from model_zoo.weights.gguf_config import hf_config

_FLOATS = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = tuple(
    GGMLQuantizationType[name] for name in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K".split()
)
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GROUP = 32_768  # values
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file.  Quantised tensors are read as float32.

    Raises ValueError, naming the file, for damage, an architecture other than llama, a type that
    cannot be dequantised, or a tensor that has no Hugging Face name.
    """
    file = read_gguf(path)
    factors = {
        name: _decode(file.raw(name), file.tensors[name])
        for name in _ROPE_FACTORS
        if name in file.tensors
    }
    config = hf_config(file, factors)
    _refuse_unsupported(file)
    sources = {hf_name(name): name for name in file.tensors if name not in _ROPE_FACTORS}
    infos = {ours: _info(file.tensors[theirs]) for ours, theirs in sources.items()}
    return Checkpoint(str(path), config, infos, _reader(file, config, sources))


def hf_name(name: str) -> str:
    """The Hugging Face name of a llama tensor; "" when there is none."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if not match:
        return ""
    layer, base, kind = match.groups()
    if layer is None:
        return f"{_TOP[base]}.{kind}" if base in _TOP else ""
    return f"model.layers.{layer}.{_IN_LAYER[base]}.{kind}" if base in _IN_LAYER else ""


def unpermuted_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Which stored row holds each row of q or k, i32[heads * head_dim].

    The llama converters of GGUF interleave the two halves of each head's rotary pairs; Hugging
    Face (and rope here) rotates halves.  `num_heads` is the tensor's own: K for k, not N.
    """
    rows = np.arange(num_heads * head_dim, dtype=np.int32)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _refuse_unsupported(file: GGUFFile) -> None:
    unknown = [n for n in file.tensors if n not in _ROPE_FACTORS and not hf_name(n)]
    if unknown:
        raise ValueError(
            f"{file.path}: {len(unknown)} tensors have no place in a llama model: "
            f"{', '.join(unknown[:8])}{' ...' if len(unknown) > 8 else ''}"
        )
    for name, tensor in file.tensors.items():
        if tensor.kind not in _FLOATS and tensor.kind not in _QUANTISED:
            names = [kind.name for kind in (*_FLOATS, *_QUANTISED)]
            raise ValueError(
                f"{file.path}: tensor {name} has the type {tensor.kind.name}; "
                f"supported types: {', '.join(names)}"
            )


def _info(tensor: GGUFTensor) -> TensorInfo:
    dtype = _FLOATS.get(tensor.kind, np.dtype(np.float32))
    stored = dtype.name if tensor.kind in _FLOATS else tensor.kind.name
    return TensorInfo(tensor.shape, dtype.name, stored)


def _decode(raw: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    if tensor.kind in _FLOATS:
        return raw.view(_FLOATS[tensor.kind]).reshape(tensor.shape)
    return dequantise(raw, tensor.kind).reshape(tensor.shape)


def dequantise(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Whole blocks u8[blocks * block_bytes] to f32[blocks * block]."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block), np.float32)
    step = _GROUP // block  # so that the intermediate arrays stay in the processor's cache
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        values[part] = getattr(quants, kind.name).dequantize_blocks(blocks[part])
    return values.reshape(-1)


def _reader(
    file: GGUFFile, config: dict[str, Any], sources: dict[str, str]
) -> Callable[[str], np.ndarray]:
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }

    def read(name: str) -> np.ndarray:
        tensor = file.tensors[sources[name]]
        raw = file.raw(sources[name])
        num_heads = heads.get(name.split(".")[-2])
        if num_heads is None:
            return _decode(raw, tensor)
        order = unpermuted_rows(num_heads, config["head_dim"])
        if tensor.shape[0] != len(order):
            raise ValueError(
                f"{file.path}: tensor {sources[name]} has {tensor.shape[0]} rows, but "
                f"{num_heads} heads of {config['head_dim']} need {len(order)}"
            )
        # rows are whole blocks, so that they move while still small
        return _decode(raw.reshape(tensor.shape[0], -1)[order].reshape(-1), tensor)

    return read
