"""What a kernel is given: the arguments of `api`, as every kernel takes them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.plan import NO_WINDOW, Mask, Rows


class Call(NamedTuple):
    """One attention over one layer."""

    q: jax.Array  # [T, N, H]
    kv: jax.Array  # [L, blocks, K, block_size, 2H]
    layer: jax.Array  # i32[1]
    rows: Rows  # every entry of the block tables is a block: a kernel may follow it
    mask: Mask
    window: jax.Array  # i32[]  that of the mask; NO_WINDOW where it has none
    factors: jax.Array  # f32[K, 2]  k and v are the stored values times these

    @classmethod
    def of(  # noqa: PLR0913  a step's arrays
        cls,
        q: jax.Array,
        kv: jax.Array,
        layer: jax.Array,
        rows: Rows,
        mask: Mask,
        factors: jax.Array | None,
    ) -> "Call":
        tables = jnp.clip(rows.block_tables, 0, kv.shape[1] - 1)
        window = jnp.asarray(NO_WINDOW if mask.window is None else mask.window, jnp.int32)
        if factors is None:
            factors = jnp.ones((kv.shape[2], 2), jnp.float32)
        layer = jnp.asarray(layer, jnp.int32).reshape(1)
        return cls(q, kv, layer, rows._replace(block_tables=tables), mask, window, factors)

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.q.shape[1] // self.kv.shape[2]
