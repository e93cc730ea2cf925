"""What a checkpoint is, and how its tensors map to the parameters of a module."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where one checkpoint tensor goes: `param[index] = tensor` (or its transpose).

    A parameter is often larger than a checkpoint tensor: layers are stacked, q/k/v are joined.
    """

    path: str  # dotted path of the parameter in the module, for example "layers.qkv"
    index: tuple[int | slice, ...] = ()  # () means all of it
    transpose: bool = False  # the checkpoint's [out, in] becomes [in, out]


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint, known without reading it."""

    shape: tuple[int, ...]
    dtype: str  # of the array that `read` returns: float32, float16, bfloat16, ...
    stored: str  # as the file has it; differs from `dtype` when quantised, for example Q4_1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: Hugging Face tensor names, whatever the file format.

    Opening reads headers only.  `read(name)` returns one tensor, [out, in] for matrices; the array
    may be a read-only view of the file.
    """

    path: str
    hf_config: dict[str, Any]  # the contents of config.json, or the same made from metadata
    infos: Mapping[str, TensorInfo]
    read: Callable[[str], np.ndarray]
    read_part: Callable[[str, tuple[slice, ...]], np.ndarray] | None = None
    """Where the format allows: `read(name)[part]` without reading the rest of the tensor."""
    restore: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Orbax only: abstract parameters by dotted path, with shardings, to arrays in them."""

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor once, in the order that is cheapest to read."""
        for name in self.infos:
            yield name, self.read(name)
