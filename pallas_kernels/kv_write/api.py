"""Writes a step's K and V into the cache: the one entrance for all back ends."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import xla
from pallas_kernels.ragged_paged_attention.api import side_by_side

Implementation = Literal["auto", "xla", "tpu"]


def kv_write(  # noqa: PLR0913  one flat signature for all back ends
    kv: jax.Array,  # KV of all layers, donated or the carry of a loop: written in place
    layer: jax.Array,  # i32[]
    slots: jax.Array,  # i32[T]  block * block_size + offset; >= S means padding; never negative
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_scales: jax.Array | None = None,  # f32[L, K, 2]  of one-byte KV
    *,
    implementation: Implementation = "xla",
) -> jax.Array:
    """The KV with token t in slot slots[t] of the layer; padding is dropped.

    Real slots must differ from one another, and none may be negative (-1 is the last slot to JAX).
    One-byte KV holds k / kv_scales[layer, head, 0] and v / kv_scales[layer, head, 1], rounded and
    clipped to the range of its dtype.

    `implementation`: "auto" takes the kernel on a TPU and XLA's scatter elsewhere (on a GPU that is
    one kernel, in place).  Raises ValueError for one-byte KV without scales, and for "tpu" where
    the kernel cannot write such a KV.
    """
    values = _values(kv, layer, k, v, kv_scales)
    if implementation == "xla":
        return xla.kv_write(kv, layer, slots, values)
    from pallas_kernels.kv_write import tpu  # Pallas takes a second to load

    reason = tpu.unsupported(kv)
    if implementation == "tpu":
        if reason is not None:
            raise ValueError(f"KV write kernel 'tpu': {reason}")
        return tpu.kv_write(kv, layer, slots, values)
    kernels = {} if reason else {"tpu": tpu.kv_write}
    return jax.lax.platform_dependent(kv, layer, slots, values, default=xla.kv_write, **kernels)


def _values(
    kv: jax.Array, layer: jax.Array, k: jax.Array, v: jax.Array, kv_scales: jax.Array | None
) -> jax.Array:
    """[T, K, 2H] as the cache holds them, in its dtype."""
    values = side_by_side(k, v)
    if kv.dtype.itemsize > 1:
        return values.astype(kv.dtype)
    if kv_scales is None:
        raise ValueError(f"a KV of {kv.dtype} needs kv_scales of shape [L, K, 2]")
    scales = jnp.repeat(kv_scales[layer], kv.shape[-1] // 2, axis=-1)  # [K, 2H]
    values = values.astype(jnp.float32) / scales
    if jnp.issubdtype(kv.dtype, jnp.integer):
        top = jnp.iinfo(kv.dtype).max  # and not one more below: symmetric
        values = jnp.round(values)
    else:
        top = float(jnp.finfo(kv.dtype).max)
    return jnp.clip(values, -top, top).astype(kv.dtype)
