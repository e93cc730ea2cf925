"""GGUF files under Hugging Face names, row order and values."""

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from model_zoo import registry
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
_GROUP = 131_072  # values
_MAX_EXPERTS = 16_384
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class _Source(NamedTuple):
    """Where a Hugging Face tensor is in the file, and what must be undone."""

    name: str
    expert: int | None = None  # of a tensor that holds all experts
    heads: int | None = None  # of q or k whose rows are interleaved
    offset: float = 0.0  # that was added to a norm


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file.  Quantised tensors are read as float32.

    Raises ValueError, naming the file, for damage, an architecture that is not supported, a type
    that cannot be dequantised, or a tensor that has no Hugging Face name.
    """
    file = read_gguf(path)
    factors = {
        name: _decode(file.raw(name), file.tensors[name])
        for name in _ROPE_FACTORS
        if name in file.tensors and file.tensors[name].kind in _FLOATS
    }
    config = hf_config(file, factors)
    sources = _sources(file, config)
    infos = {name: _info(file.tensors[source.name], source) for name, source in sources.items()}
    head_dim = config["head_dim"]
    return Checkpoint(str(path), config, infos, lambda name: _read(file, sources[name], head_dim))


def _sources(file: GGUFFile, config: dict[str, Any]) -> dict[str, _Source]:
    """Every tensor by its Hugging Face name; a tensor of all experts counts once for each."""
    family = registry.family(config["model_type"])
    stored = family.gguf
    if stored is None:  # `gguf_config` refused it before
        raise ValueError(f"llama.cpp has no {family.model_type}")
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    found: dict[str, _Source] = {}
    unknown: list[str] = []
    for name, tensor in file.tensors.items():
        if name in _ROPE_FACTORS:
            continue
        ours = family.from_gguf(name)
        if ours is None:
            unknown.append(name)
            continue
        source = _Source(
            name,
            heads=heads.get(ours.part) if stored.interleaved else None,
            offset=stored.norm_offset if ours.of_norm else 0.0,
        )
        if not ours.of_experts:
            found[ours.name] = source
        elif len(tensor.shape) != 3:
            raise ValueError(f"{file.path}: tensor {name} of all experts is {list(tensor.shape)}")
        else:
            for expert in range(min(tensor.shape[0], _MAX_EXPERTS)):
                found[ours.expert(expert)] = source._replace(expert=expert)
    if unknown:
        raise ValueError(
            f"{file.path}: {len(unknown)} tensors have no place in a {family.model_type} model: "
            f"{', '.join(unknown[:8])}{' ...' if len(unknown) > 8 else ''}"
        )
    _refuse_unreadable(file)
    return found


def unpermuted_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Which stored row holds each row of q or k, i32[heads * head_dim].

    The llama converters of GGUF interleave the two halves of each head's rotary pairs; Hugging
    Face (and rope here) rotates halves.  `num_heads` is the tensor's own: K for k, not N.
    """
    rows = np.arange(num_heads * head_dim, dtype=np.int32)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _refuse_unreadable(file: GGUFFile) -> None:
    for name, tensor in file.tensors.items():
        if tensor.kind not in _FLOATS and tensor.kind not in _QUANTISED:
            kinds = [kind.name for kind in (*_FLOATS, *_QUANTISED)]
            raise ValueError(
                f"{file.path}: tensor {name} has the type {tensor.kind.name}; "
                f"supported types: {', '.join(kinds)}"
            )


def _info(tensor: GGUFTensor, source: _Source) -> TensorInfo:
    dtype = _FLOATS.get(tensor.kind, np.dtype(np.float32))
    stored = dtype.name if tensor.kind in _FLOATS else tensor.kind.name
    shape = tensor.shape if source.expert is None else tensor.shape[1:]
    return TensorInfo(shape, "float32" if source.offset else dtype.name, stored)


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


def _read(file: GGUFFile, source: _Source, head_dim: int) -> np.ndarray:
    tensor, raw = file.tensors[source.name], file.raw(source.name)
    if source.expert is not None:
        raw = raw.reshape(tensor.shape[0], -1)[source.expert]
        tensor = tensor._replace(shape=tensor.shape[1:])
    if source.offset:
        return _decode(raw, tensor).astype(np.float32) - np.float32(source.offset)
    if source.heads is None:
        return _decode(raw, tensor)
    order = unpermuted_rows(source.heads, head_dim)
    if tensor.shape[0] != len(order):
        raise ValueError(
            f"{file.path}: tensor {source.name} has {tensor.shape[0]} rows, but "
            f"{source.heads} heads of {head_dim} need {len(order)}"
        )
    # rows are whole blocks, so that they move while still small
    return _decode(raw.reshape(tensor.shape[0], -1)[order].reshape(-1), tensor)
