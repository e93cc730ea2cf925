"""Writes a step's K and V into the cache: the one entrance for all back ends."""

import jax

from pallas_kernels.kv_write import xla


def kv_write(
    kv: jax.Array,  # KV of all layers, donated or the carry of a loop: written in place
    layer: jax.Array,  # i32[]
    slots: jax.Array,  # i32[T]  block * block_size + offset; >= S means padding; never negative
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
) -> jax.Array:
    """The KV with token t in slot slots[t] of the layer; padding is dropped.

    Real slots must differ from one another, and none may be negative (-1 is the last slot to JAX).
    """
    return xla.kv_write(kv, layer, slots, k, v)
