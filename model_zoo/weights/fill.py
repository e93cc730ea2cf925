"""Weights from a checkpoint into a module, one parameter at a time."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from model_zoo import registry
from model_zoo.checkpoint import Checkpoint, Place
from model_zoo.weights.account import Account, account, check_tied

_THREADS = 4
_LINE = 64  # bytes
RUNNABLE = ("float32", "bfloat16")


def load_module(
    checkpoint: Checkpoint,
    dtype: str,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    *,
    max_len: int = 0,
) -> Any:
    """The nnx module of `checkpoint` with its weights in place and cast to `dtype`.

    `shardings` gives every parameter's sharding by dotted path; without, all lie on the default
    device.  `max_len`: longest request served, which some rope variants depend on.  The host holds
    one parameter at a time.  Raises ValueError when the checkpoint and its config do not agree in
    every tensor, and for a dtype other than float32 and bfloat16: float16 overflows in activations
    of models trained in bfloat16.
    """
    abstract, places = abstract_module(checkpoint, dtype, max_len=max_len)
    graph, state = nnx.split(abstract)
    leaves = dict(_dotted(state))
    targets = {path: _target(path, leaf, shardings) for path, leaf in leaves.items()}
    plan = account(checkpoint, places, {path: a.shape for path, a in targets.items()})
    if plan.tied:
        check_tied(checkpoint)
    if checkpoint.restore:
        arrays = checkpoint.restore(targets)
    else:
        arrays = _fill(checkpoint, plan, places, targets)
    for path, leaf in leaves.items():
        leaf.set_value(arrays[path])
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


def param_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's parameters by dotted path."""
    return {path: leaf.get_value().shape for path, leaf in _dotted(nnx.state(module))}


def gather(
    checkpoint: Checkpoint,
    names: tuple[str, ...],
    places: Mapping[str, Place],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """One parameter on the host, put together from its tensors."""
    param = _aligned(shape, dtype)

    def put(name: str) -> None:
        place = places[name]
        tensor = checkpoint.read(name).astype(dtype, copy=False)
        param[place.index] = tensor.T if place.transpose else tensor

    with ThreadPoolExecutor(_THREADS) as pool:  # numpy works outside the interpreter's lock
        list(pool.map(put, names))
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
    checkpoint: Checkpoint,
    plan: Account,
    places: Mapping[str, Place],
    targets: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    arrays: dict[str, jax.Array] = {}
    for path, target in targets.items():
        host = gather(checkpoint, plan.loaded[path], places, target.shape, target.dtype)
        arrays[path] = jax.make_array_from_callback(
            target.shape, target.sharding, lambda index, host=host: host[index]
        )
        arrays[path].block_until_ready()  # so that only one parameter is on the host
    return arrays
