"""Weights from a checkpoint into a module, one parameter at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from model_zoo import registry
from model_zoo.checkpoint import Checkpoint, Place
from model_zoo.int8 import quantize
from model_zoo.parameters import with_int8
from model_zoo.weights import region
from model_zoo.weights.account import Account, account, check_tied
from model_zoo.weights.order import Order, share_order
from model_zoo.weights.region import Region

_THREADS = 4
_LINE = 64  # bytes
RUNNABLE = ("float32", "bfloat16")


def load_module(
    checkpoint: Checkpoint,
    dtype: str,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    *,
    max_len: int = 0,
    kv_copies: int = 1,
    int8: bool = False,
) -> Any:
    """The nnx module of `checkpoint` with its weights in place and cast to `dtype`; with `int8` its
    matrices made int8 from their float32 values, one parameter at a time.

    `shardings` gives every parameter's sharding by dotted path; without, all lie on the default
    device.  `max_len`: longest request served, which some rope variants depend on.  `kv_copies`:
    see `partition.kv_copies`.  The host holds one parameter at a time, and of it only the shards of
    its own devices where the format allows.  Raises ValueError when the checkpoint and its config
    do not agree in every tensor, and for a dtype other than float32 and bfloat16: float16 overflows
    in activations of models trained in bfloat16.
    """
    abstract, places = abstract_module(checkpoint, dtype, max_len=max_len)
    stored = param_shapes(abstract)
    config = abstract.config
    if kv_copies > 1 or int8:
        served, make = with_int8(with_kv_copies(config, kv_copies), int8), type(abstract)
        abstract = nnx.eval_shape(lambda: make(served, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    leaves = dict(_dotted(state))
    placed = {path: _target(path, leaf, shardings) for path, leaf in leaves.items()}
    targets = {path: _as_float(target) for path, target in placed.items() if path in stored}
    plan = account(checkpoint, places, stored)
    if plan.tied:
        check_tied(checkpoint)
    orders = {
        path: share_order(config, leaf.get_metadata().get("axes"), targets[path], kv_copies)
        for path, leaf in leaves.items()
        if path in targets
    }
    strange = [path for path in targets if targets[path].shape != stored[path] and not orders[path]]
    if strange:
        raise ValueError(
            f"{', '.join(strange)} cannot be shared among more chips than the model has kv heads; "
            f"choose mesh.tensor={config.K} or a divisor of it"
        )
    if checkpoint.restore:
        found = _restore(checkpoint, stored, targets, orders)
    else:
        found = _fill(_Source(checkpoint, plan, places, stored), targets, orders)
    for path, array in found:
        for name, value in _quantized(path, array, placed).items():
            leaves[name].set_value(value)
    return nnx.merge(graph, state)


def abstract_module(
    checkpoint: Checkpoint, dtype: str, *, max_len: int = 0
) -> tuple[Any, dict[str, Place]]:
    """The module with shapes instead of weights, and where each tensor of the checkpoint goes."""
    if dtype not in RUNNABLE:
        raise ValueError(f"model.dtype={dtype!r} cannot run; use one of {', '.join(RUNNABLE)}")
    family, config = registry.configure(
        checkpoint.hf_config, dtype, max_len=max_len, where=checkpoint.path
    )
    module = nnx.eval_shape(lambda: family.module(config, rngs=nnx.Rngs(0)))
    return module, family.places(config)


def with_kv_copies(config: Any, copies: int) -> Any:
    """A model's config in which the cache holds `copies` of every kv head."""
    return dataclasses.replace(config, K=config.K * copies) if copies > 1 else config


def _as_float(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """As a parameter is loaded that will be int8."""
    return target.update(dtype=jnp.float32) if target.dtype == jnp.int8 else target


def _quantized(
    path: str, array: jax.Array, placed: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The loaded parameter as the module has it: itself, or int8 with its scales."""
    if placed[path].dtype != jnp.int8:
        return {path: array}
    names = (path, f"{path}_scale")
    run = jax.jit(quantize, out_shardings=tuple(placed[name].sharding for name in names))
    values = jax.block_until_ready(run(array))
    return dict(zip(names, values, strict=True))


def param_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's parameters by dotted path."""
    return {path: leaf.get_value().shape for path, leaf in _dotted(nnx.state(module))}


def gather(
    checkpoint: Checkpoint,
    names: tuple[str, ...],
    places: Mapping[str, Place],
    target: tuple[tuple[int, ...], np.dtype],  # shape and type of the parameter
    part: Region | None = None,
) -> np.ndarray:
    """One parameter (or a part of it) on the host, put together from its tensors."""
    shape, dtype = target
    wanted = part or region.whole(shape)
    param = _aligned(region.shape_of(wanted), dtype)

    def put(found: region.Overlap) -> None:
        tensor = region.read(checkpoint, found, places[found.name].transpose)
        param[found.into] = tensor.astype(dtype, copy=False)

    with ThreadPoolExecutor(_THREADS) as pool:  # numpy works outside the interpreter's lock
        list(pool.map(put, region.overlaps(names, places, wanted, shape)))
    return param


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that the CPU back end takes over without a copy: it begins at a cache line.

    Nobody may write to it once it has been given to jax.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype of that name, bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _dotted(state: Any) -> list[tuple[str, Any]]:
    return [(".".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(state)]


def _target(
    path: str, leaf: Any, shardings: Mapping[str, jax.sharding.Sharding] | None
) -> jax.ShapeDtypeStruct:
    if shardings is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    elif path in shardings:
        sharding = shardings[path]
    else:
        raise ValueError(f"parameter {path} has no sharding; add it to the sharding rules")
    value = leaf.get_value()
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def _fill(
    source: "_Source",
    targets: Mapping[str, jax.ShapeDtypeStruct],
    orders: Mapping[str, Order | None],
) -> Iterator[tuple[str, jax.Array]]:
    for path, target in targets.items():
        read = functools.cache(source.reader(path, target, orders[path]))

        def shard(
            index: Any, read: Any = read, shape: tuple[int, ...] = target.shape
        ) -> np.ndarray:
            return read(tuple((s.start, s.stop) for s in region.resolve(index, shape)))

        array = jax.make_array_from_callback(target.shape, target.sharding, shard)
        yield path, array.block_until_ready()  # so that only one parameter is on the host


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checkpoint, and which of its tensors make up each parameter."""

    checkpoint: Checkpoint
    plan: Account
    places: Mapping[str, Place]
    stored: Mapping[str, tuple[int, ...]]  # shapes of the parameters in the checkpoint's order

    def reader(
        self, path: str, target: jax.ShapeDtypeStruct, order: Order | None
    ) -> Callable[[tuple[tuple[int, int], ...]], np.ndarray]:
        """Reads shards: from the file where the format has parts, else from the whole parameter."""
        shape, dtype = self.stored[path], np.dtype(target.dtype)
        make = functools.partial(
            gather, self.checkpoint, self.plan.loaded[path], self.places, (shape, dtype)
        )
        every = functools.cache(make)
        reads_parts = self.checkpoint.read_part is not None

        def read(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
            wanted = tuple(slice(*pair) for pair in bounds)
            pieces = order.pieces(wanted) if order else [wanted]
            if pieces == [region.whole(shape)]:
                return every()
            found = [make(piece) if reads_parts else every()[piece] for piece in pieces]
            if order is None or len(found) == 1:
                return found[0]
            return np.concatenate(found, axis=order.axis)

        return read


def _restore(
    checkpoint: Checkpoint,
    stored: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    orders: Mapping[str, Order | None],
) -> Iterator[tuple[str, jax.Array]]:
    """Arrays of the format's own reader, which knows the checkpoint's order only; what lies in
    another is reordered on the devices, one parameter after the other.
    """
    assert checkpoint.restore is not None
    wanted = {}
    for path, target in targets.items():
        sharding = target.sharding
        if orders[path] and stored[path] != target.shape:  # its shares need not divide
            sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        wanted[path] = jax.ShapeDtypeStruct(stored[path], target.dtype, sharding=sharding)
    arrays = checkpoint.restore(wanted)
    for path, order in orders.items():
        if order is not None:
            take = jax.jit(order.apply, out_shardings=targets[path].sharding, donate_argnums=0)
            arrays[path] = take(arrays[path])
        yield path, arrays.pop(path)
