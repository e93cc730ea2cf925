"""How a model lies on a mesh of chips: logical axes, the rules that map them, attention on shards.

Parameters name their axes (`nnx.Param(..., axes=("layers", "mlp", "embed"))`); `RULES` says which
mesh axis splits which of them, and XLA derives the rest.  Attention and the KV write run chip by
chip, since a chip's queries need its own kv heads only, and since a kernel cannot be split by XLA.

Some axes are several parts one after the other ("qkv": q, k, v).  Split over chips they are
reordered as the weights load, so that a chip's share has its share of every part: see `split`.

The mesh is the one of the surrounding `jax.set_mesh`; without any, everything is as on one chip.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.kv_write import api as writing
from pallas_kernels.ragged_paged_attention import api as attention

Kernels = Literal["auto", "xla"]
DATA, TENSOR = "data", "tensor"

# logical axis -> mesh axes that split it; an axis that is not listed is never split
RULES: Mapping[str, tuple[str, ...]] = {
    "vocab": (TENSOR,),
    "kv_heads": (TENSOR,),
    "heads": (TENSOR,),
    "qkv": (TENSOR,),
    "gate_up": (TENSOR,),
    "mlp": (TENSOR,),
    "tokens": (DATA,),  # of a step, wherever a token needs no other
    "rows": (DATA, TENSOR),  # of logits: sampling looks at one row at a time
}
PARTS = {"qkv": 3, "gate_up": 2}  # axes of several parts; those of gate_up are equal


def make_mesh(devices: Sequence[Any], data: int, tensor: int) -> Mesh:
    """The first data x tensor of `devices`, arranged as their network is.

    Raises ValueError when there are too few.
    """
    if data * tensor > len(devices):
        raise ValueError(
            f"mesh.data={data} x mesh.tensor={tensor} needs {data * tensor} devices; "
            f"there are {len(devices)}"
        )
    grid = mesh_utils.create_device_mesh(
        (data, tensor), devices[: data * tensor], allow_split_physical_axes=True
    )
    return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)


def spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """Which mesh axes split an array with these logical axes.

    An axis that the chips do not divide stays whole on every chip, and a mesh axis splits one axis
    of an array only: the first that asks for it.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} logical axes {tuple(axes)} for an array of {tuple(shape)}")
    taken: set[str] = set()
    entries: list[tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=True):
        names = () if axis is None else _names(axis, size, mesh)
        if taken & set(names):
            names = ()
        taken.update(names)
        entries.append(names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, split over the mesh as its logical axes say."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, x.shape, mesh)))


def split(x: jax.Array, axis: str, sizes: Sequence[int] | None = None) -> list[jax.Array]:
    """The parts of the last axis of `x`, whose logical name is `axis`; `sizes` None: equal ones.

    Every chip cuts its own share; see `shares` for the order of a split axis.
    """
    *lead, width = x.shape
    sizes = sizes or [width // PARTS[axis]] * PARTS[axis]
    ways = ways_of(axis, width, jax.sharding.get_abstract_mesh())
    if ways == 1:
        return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=-1)
    shared = x.reshape(*lead, ways, width // ways)
    parts = jnp.split(shared, (np.cumsum(sizes)[:-1] // ways).tolist(), axis=-1)
    return [part.reshape(*lead, size) for part, size in zip(parts, sizes, strict=True)]


def shares(
    sizes: Sequence[int],  # of the parts in the checkpoint
    copies: Sequence[int],  # of every entry of a part
    ways: int,
) -> list[list[slice]]:
    """What each of `ways` chips holds of an axis of several parts: slices of the checkpoint's axis,
    one a part.

    With copies, neighbouring chips hold the same; a chip then has one kv head.
    """
    starts = [0, *np.cumsum(sizes)[:-1].tolist()]
    found = []
    for chip in range(ways):
        found.append([])
        for start, size, count in zip(starts, sizes, copies, strict=True):
            share = size * count // ways
            first = start + chip // count * share
            found[-1].append(slice(first, first + share))
    return found


def ways_of(axis: str, size: int, mesh: Any) -> int:
    """Into how many shares an axis of that size is split."""
    if mesh is None or mesh.empty:
        return 1
    return _count(mesh, _names(axis, size, mesh))


def kv_write(  # noqa: PLR0913  a step's arrays, and how to run
    kv: Any,
    layer: jax.Array,
    slots: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kernels: Kernels = "xla",
) -> Any:
    """`pallas_kernels.kv_write`, every chip for its kv heads."""
    run = functools.partial(writing.kv_write, implementation=kernels)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(kv, layer, slots, k, v)
    heads, cache = spec((None, "kv_heads", None), k.shape, mesh), kv_spec(k.shape[1], mesh)
    whole = PartitionSpec()
    specs = (cache, whole, whole, heads, heads)
    run = jax.shard_map(run, in_specs=specs, out_specs=cache, check_vma=False)
    return run(kv, layer, slots, k, v)


def ragged_paged_attention(
    q: jax.Array, kv: Any, layer: jax.Array, *rows: jax.Array, **options: Any
) -> jax.Array:
    """`pallas_kernels.ragged_paged_attention`, every chip for the queries of its kv heads.

    `rows`: block_tables, query_starts, kv_lens, num_decodes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return attention.ragged_paged_attention(q, kv, layer, *rows, **options)
    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    fixed = {name: value for name, value in options.items() if name not in arrays}

    def run(q, kv, layer, rows, arrays):  # a chip's shards
        return attention.ragged_paged_attention(q, kv, layer, *rows, **arrays, **fixed)

    kv_heads = attention.num_kv_heads(kv)
    heads = spec((None, "kv_heads", None), (1, kv_heads, 1), mesh)
    whole = PartitionSpec()
    specs = (heads, kv_spec(kv_heads, mesh), whole, whole, whole)
    run = jax.shard_map(run, in_specs=specs, out_specs=heads, check_vma=False)
    return run(q, kv, layer, rows, arrays)


def kv_spec(kv_heads: int, mesh: Any) -> PartitionSpec:
    """How the KV array is split."""
    axes = attention.KV_AXES
    return spec(axes, [kv_heads if axis == "kv_heads" else 1 for axis in axes], mesh)


def kv_copies(heads: int, kv_heads: int, tensor: int) -> int:
    """How many equal copies of each kv head the cache must hold for `tensor` chips to have one.

    Raises ValueError when heads cannot be shared out evenly.
    """
    if kv_heads % tensor == 0:
        return 1
    if tensor % kv_heads == 0 and heads % tensor == 0:
        return tensor // kv_heads
    fitting = [
        n for n in range(1, heads + 1) if not kv_heads % n or not (n % kv_heads or heads % n)
    ]
    raise ValueError(
        f"mesh.tensor={tensor} does not share out {heads} heads of {kv_heads} kv heads evenly; "
        f"choose one of {', '.join(map(str, fitting))}"
    )


def _names(axis: str, size: int, mesh: Any) -> tuple[str, ...]:
    """The mesh axes that split one logical axis of that size; () when it stays whole."""
    names = tuple(name for name in RULES.get(axis, ()) if mesh.shape.get(name, 1) > 1)
    equal = PARTS[axis] if axis == "gate_up" else 1
    return () if size % (equal * _count(mesh, names)) else names


def _count(mesh: Any, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)
