"""Writes new K and V into their slots: one scatter, in place if the KV is donated or carried."""

import jax


def kv_write(
    kv: jax.Array,  # [L, blocks, K, block_size, 2H]
    layer: jax.Array,  # i32[]
    slots: jax.Array,  # i32[T], >= S means padding; real slots are unique
    values: jax.Array,  # [T, K, 2H]
) -> jax.Array:
    """KV with token t in slot slots[t] of the layer; padding is dropped."""
    block_size = kv.shape[3]
    # Indices around the slice axis put the indexed axes first: the update is [T, K, 2H].
    # A padding slot's block is >= blocks, and only that is dropped: -1 would be the last block.
    where = kv.at[layer, slots // block_size, :, slots % block_size]
    return where.set(values.astype(kv.dtype), mode="drop")
