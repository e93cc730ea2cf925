"""Writes new K and V into their slots: one scatter, in place if the KV is donated or carried."""

import jax
import jax.numpy as jnp


def kv_write(
    kv: jax.Array,  # [L, blocks, K, block_size, 2H]
    layer: jax.Array,  # i32[]
    slots: jax.Array,  # i32[T], >= S means padding; real slots are unique
    values: jax.Array,  # [T, K, 2H]
) -> jax.Array:
    """KV with token t in slot slots[t] of the layer; padding is dropped."""
    _, _, num_heads, block_size, _ = kv.shape
    # A window of one head: with all heads of a token in one, which do not lie side by side, a TPU's
    # compiler turns the whole KV around for the scatter and back.
    # A padding slot's block is >= blocks, and only that is dropped: -1 would be the last block.
    blocks, offsets = slots // block_size, slots % block_size
    where = kv.at[layer, blocks[:, None], jnp.arange(num_heads), offsets[:, None]]
    return where.set(values.astype(kv.dtype), mode="drop")
