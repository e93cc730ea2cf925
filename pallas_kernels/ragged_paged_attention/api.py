"""Ragged paged attention and the KV it reads: the one entrance for all back ends.

The KV is one array for all layers, K and V side by side in the minor axis:
[L, blocks, K, block_size, 2H].  Nothing outside `pallas_kernels` knows that.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import xla

KV_AXES = ("layers", "blocks", "kv_heads", None, None)  # what the axes of the KV array are


def kv_shape(
    layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Shape of the KV array."""
    return (layers, num_blocks, kv_heads, block_size, 2 * head_dim)


def init_kv(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """An empty KV of a shape from `kv_shape`."""
    return jnp.zeros(shape, dtype)


def num_kv_heads(kv: jax.Array) -> int:
    """K of a KV array."""
    return kv.shape[KV_AXES.index("kv_heads")]


def ragged_paged_attention(  # noqa: PLR0913  one flat signature for all back ends
    q: jax.Array,  # [T, N, H]
    kv: jax.Array,  # KV of all layers, already holding this step's tokens
    layer: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[B, P]
    query_starts: jax.Array,  # i32[B + 1]
    kv_lens: jax.Array,  # i32[B]
    num_decodes: jax.Array,  # i32[1]
    *,
    block_size: int,
    window: int | jax.Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attention output [T, N, H] of the packed queries; tokens of no row are zero.

    Row b owns the queries query_starts[b]:query_starts[b + 1], which are its last positions; the
    first num_decodes rows have exactly one, any later row has none or more.  A query sees the
    positions of its row up to its own, of those only the last `window` (itself included).  Scores
    are q . k * scale (H ** -0.5 by default), then soft_cap * tanh(scores / soft_cap).  Positions
    that nobody wrote may hold anything, NaN included.
    """
    if kv.shape[3] != block_size:
        raise ValueError(f"the KV has blocks of {kv.shape[3]} tokens, the step has {block_size}")
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    mask = xla.Mask(window, soft_cap, scale)
    rows = xla.Rows(block_tables, query_starts, kv_lens, num_decodes[0])
    return xla.ragged_paged_attention(q, kv, layer, rows, mask)
