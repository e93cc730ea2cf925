"""Where the arrays of a step lie: on one device, or split over a mesh by the rules of the zoo."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_zoo import partition
from pallas_kernels.ragged_paged_attention import api as attention


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The mesh of a step; without one, everything lies on one device and nothing here does
    anything.
    """

    mesh: Mesh | None = None

    @property
    def device(self) -> Any:
        """The first of the devices, which are all of one kind."""
        return jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Surrounds tracing and lowering; attention finds the mesh there."""
        return jax.set_mesh(self.mesh) if self.mesh is not None else contextlib.nullcontext()

    def of(self, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding | None:
        """The sharding of an array with these logical axes."""
        if self.mesh is None:
            return None
        return NamedSharding(self.mesh, partition.spec(axes, shape, self.mesh))

    @property
    def whole(self) -> NamedSharding | None:
        """A copy on every device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def place(self, tree: Any, sharding: NamedSharding | None = None) -> Any:
        """Abstract arrays, each with `sharding` (a copy on every device by default) unless it has
        one already.
        """
        if self.mesh is None:
            return tree

        def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if leaf.sharding is not None:
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or self.whole)

        return jax.tree.map(one, tree)

    def kv(self, abstract: Any) -> Any:
        """The abstract KV, split over its kv heads."""
        if self.mesh is None:
            return abstract
        spec = partition.kv_spec(attention.num_kv_heads(abstract), self.mesh)
        return self.place(abstract, NamedSharding(self.mesh, spec))

    def keep_whole(self, tree: Any) -> Any:
        """Inside a program: every device has all of it and takes its part without a message."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.whole)

    def constrain_kv(self, kv: Any) -> Any:
        """Inside a program: the KV stays where it is."""
        if self.mesh is None:
            return kv
        spec = partition.kv_spec(attention.num_kv_heads(kv), self.mesh)
        return jax.lax.with_sharding_constraint(kv, NamedSharding(self.mesh, spec))

    def weights(self, abstract: Any) -> Any:
        """Abstract weights (a state of nnx), every parameter split as its logical axes say."""
        if self.mesh is None:
            return abstract

        def one(leaf: Any) -> Any:
            value = leaf.get_value()
            return leaf.replace(self.place(value, self.of(_axes(leaf, value), value.shape)))

        return jax.tree.map(one, abstract, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def by_path(self, abstract: Any) -> dict[str, Any] | None:
        """Sharding of every parameter by dotted path, as `load_module` takes them."""
        if self.mesh is None:
            return None
        leaves = nnx.to_flat_state(self.weights(abstract))
        return {".".join(map(str, path)): leaf.get_value().sharding for path, leaf in leaves}

    def by_rows(self, function: Callable[..., Any], rows: int, *arrays: Any) -> Any:
        """`function(*arrays)`, whose rows need nothing of one another, every chip for its rows.

        All arrays have `rows` in front; so has what the function returns.
        """
        if self.mesh is None:
            return function(*arrays)
        spec = partition.spec(("rows",), (rows,), self.mesh)
        run = jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)
        return run(*arrays)


ONE_DEVICE = Sharding()


def make(data: int, tensor: int) -> Sharding:
    """The first data x tensor devices of all processes; one device needs no mesh.

    Raises ValueError when there are too few.
    """
    if data * tensor == 1:
        return ONE_DEVICE
    return Sharding(partition.make_mesh(jax.devices(), data, tensor))


def device_bytes(tree: Any) -> int:
    """Bytes that the abstract arrays of `tree` take on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        size = leaf.dtype.itemsize
        for axis in shape:
            size *= axis
        total += size
    return total


def _axes(leaf: Any, value: Any) -> Sequence[str | None]:
    """The logical axes of a parameter; one that declares none is never split."""
    axes = leaf.get_metadata().get("axes")
    return axes if axes is not None else (None,) * len(value.shape)
