"""Parts of parameters from parts of checkpoint tensors: a host reads what its chips hold."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from model_zoo.checkpoint import Checkpoint, Place

Region = tuple[slice, ...]  # one slice an axis of a parameter, each with a start and a stop


class Overlap(NamedTuple):
    """Where a tensor meets a region."""

    name: str
    into: tuple[int | slice, ...]  # index in the region's own array
    box: Region  # index in the tensor, as the parameter has it


def whole(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def resolve(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """The index that jax gives for a shard, with starts and stops."""
    return tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True))


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in region)


def overlaps(
    names: Sequence[str], places: Mapping[str, Place], region: Region, shape: Sequence[int]
) -> list[Overlap]:
    """The tensors that have something in the region of a parameter of `shape`."""
    found = (_overlap(name, places[name], region, shape) for name in names)
    return [one for one in found if one is not None]


def read(checkpoint: Checkpoint, found: Overlap, transpose: bool) -> np.ndarray:
    """The part of the tensor that lies in the region; nothing else is read if the format allows."""
    box = found.box[::-1] if transpose else found.box
    shape = checkpoint.infos[found.name].shape
    if checkpoint.read_part is None or box == whole(shape):
        part = checkpoint.read(found.name)[box]
    else:
        part = checkpoint.read_part(found.name, box)
    return part.T if transpose else part


def _overlap(name: str, place: Place, region: Region, shape: Sequence[int]) -> Overlap | None:
    index = (*place.index, *(slice(None),) * (len(shape) - len(place.index)))
    into: list[int | slice] = []
    box: list[slice] = []
    for at, wanted, size in zip(index, region, shape, strict=True):
        start, stop = (at, at + 1) if isinstance(at, int) else at.indices(size)[:2]
        low, high = max(start, wanted.start), min(stop, wanted.stop)
        if low >= high:
            return None
        if isinstance(at, int):
            into.append(low - wanted.start)
        else:
            into.append(slice(low - wanted.start, high - wanted.start))
            box.append(slice(low - start, high - start))
    return Overlap(name, tuple(into), tuple(box))
