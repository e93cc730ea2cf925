"""Many small host arrays as one int32 buffer: one transfer a program instead of sixteen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch.step import SampleInputs
from jaxserve.request import MAX_BIAS, MAX_STOP_IDS


def sample_spec(rows: int, stop_ids: int = 2 * MAX_STOP_IDS, bias: int = MAX_BIAS) -> SampleInputs:
    """Shape and type of every field of SampleInputs for `rows` R."""

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    i32, f32 = np.int32, np.float32
    return SampleInputs(
        token_index=of(i32),
        seats=of(i32),
        temperature=of(f32),
        top_k=of(i32),
        top_p=of(f32),
        min_p=of(f32),
        presence=of(f32),
        frequency=of(f32),
        repetition=of(f32),
        seed=of(np.uint32, 2),
        sample=of(i32),
        position=of(i32),
        suppress_stops=of(np.bool_),
        stop_ids=of(i32, stop_ids),
        bias_ids=of(i32, bias),
        bias=of(f32, bias),
    )


def packed_length(spec: Any) -> int:
    """Number of int32 values that `pack` makes of arrays like `spec`."""
    return sum(int(np.prod(leaf.shape)) for leaf in spec)


def pack(arrays: Any) -> np.ndarray:
    """A named tuple of numpy arrays of 4-byte numbers or bools, as one fresh i32 array."""
    return np.concatenate([_as_int32(array).reshape(-1) for array in arrays])


def unpack(packed: jax.Array, spec: Any) -> Any:
    """Inside a jitted program: the named tuple that `pack` was given."""
    fields, end = [], 0
    for leaf in spec:
        start, end = end, end + int(np.prod(leaf.shape))
        values = packed[start:end].reshape(leaf.shape)
        if leaf.dtype == np.bool_:
            fields.append(values != 0)
        elif leaf.dtype == np.int32:
            fields.append(values)
        else:
            fields.append(jax.lax.bitcast_convert_type(values, jnp.dtype(leaf.dtype)))
    return type(spec)(*fields)


def _as_int32(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.bool_:
        return array.astype(np.int32)
    return np.ascontiguousarray(array).view(np.int32)
