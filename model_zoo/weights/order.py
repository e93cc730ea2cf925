"""Parameters of several parts (q, k, v) whose shares lie chip by chip; see `partition.shares`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_zoo import partition
from model_zoo.parameters import joined
from model_zoo.weights.region import Region


@dataclasses.dataclass(frozen=True)
class Order:
    """One axis of a parameter is split into shares; each is made of slices of the checkpoint's."""

    axis: int
    width: int  # of a share
    shares: tuple[tuple[slice, ...], ...]

    def pieces(self, wanted: Region) -> list[Region]:
        """The regions of the checkpoint's parameter that, one after the other, are `wanted`."""
        along = wanted[self.axis]
        chips = range(along.start // self.width, along.stop // self.width)
        found = [piece for chip in chips for piece in self.shares[chip]]
        return [(*wanted[: self.axis], piece, *wanted[self.axis + 1 :]) for piece in found]

    def apply(self, param: jax.Array) -> jax.Array:
        """The whole parameter, reordered."""
        rows = [np.arange(s.start, s.stop) for share in self.shares for s in share]
        return jnp.take(param, np.concatenate(rows), axis=self.axis)


def share_order(
    config: Any, axes: Sequence[str | None] | None, target: jax.ShapeDtypeStruct, copies: int
) -> Order | None:
    """None for a parameter that has no axis of several parts, or that every chip has whole.

    `config`: of the model as its checkpoint has it; `copies` of its kv heads are in `target`.
    """
    axis = next((i for i, name in enumerate(axes or ()) if name in partition.PARTS), None)
    if axes is None or axis is None:
        return None
    size = target.shape[axis]
    width = target.sharding.shard_shape(target.shape)[axis]
    if width == size:
        return None
    name = str(axes[axis])
    sizes = joined(config)[name]
    counts = (1, copies, copies) if name == "qkv" else (1,) * len(sizes)
    shares = partition.shares(sizes, counts, size // width)
    return Order(axis, width, tuple(map(tuple, shares)))
