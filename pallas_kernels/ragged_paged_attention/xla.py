"""Ragged paged attention in plain XLA, for every back end that has no kernel of its own.

A step is split in two: rows of one query (decodes) and rows of many (chunks).  Both walk the KV in
spans of positions with an online softmax (arXiv 2205.14135); the bounds of every loop are the real
lengths of the step, so that cost never depends on the longest possible context.  Spans start at
multiples of their size, so the order in which a query sums up its context depends neither on how
its prompt was cut nor on its neighbours.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.plan import Mask, Rows, chunk_tiles

DECODE_ROWS = (16, 4)  # rows that share one loop over the context: of a full group, a small one
DECODE_SPAN = 128  # positions a turn of it
# (queries of one row that share one loop, positions a turn)
CHUNK_TILES = ((256, 256), (128, 128), (64, 128))
WHOLE_SPAN = 256  # positions a turn where a tile sees all of them
_MANY_LINES = 256  # of scores, from which on threads are worth sharing them evenly


class Tiles(NamedTuple):
    """How the rows of a step are cut into tiles of one size."""

    size: int  # queries a tile
    span: int  # positions a turn where something is masked
    counts: jax.Array  # i32[B]  tiles of each row
    firsts: jax.Array  # i32[B]  index in T where they begin


class Softmax(NamedTuple):
    """Online softmax state: the weighted sum so far, its normaliser, the highest score."""

    values: jax.Array  # f32[..., H]
    total: jax.Array  # f32[..., 1]
    top: jax.Array  # f32[..., 1]


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv: jax.Array,  # [L, blocks, K, block_size, 2H]
    layer: jax.Array,  # i32[]
    rows: Rows,
    mask: Mask,
) -> jax.Array:  # [T, N, H]
    """See `api`."""
    if q.dtype == jnp.float32 and isinstance(mask.scale, float):
        # One product a query instead of one a score; in bfloat16 it would round.
        q, mask = q * mask.scale, mask._replace(scale=1.0)
    return _chunks(_decode(q, kv, layer, rows, mask), q, kv, layer, rows, mask)


def _gather(kv: jax.Array, layer: jax.Array, where: jax.Array, first: int) -> jax.Array:
    """K (`first` 0) or V (`first` H) of the blocks `where`, i32[..., blocks]: [..., K, span, H].

    A CPU reads the wanted half straight into its place, which saves a copy of both.  A TPU would
    turn the whole KV around for that, so elsewhere blocks are read whole, once for K and V.
    """
    half = functools.partial(_read_half, first=first)
    whole = functools.partial(_read_whole, first=first)
    return jax.lax.platform_dependent(kv, layer, where, cpu=half, default=whole)


def _read_half(kv: jax.Array, layer: jax.Array, where: jax.Array, *, first: int) -> jax.Array:
    kv_heads, block_size, width = kv.shape[2], kv.shape[3], kv.shape[4] // 2
    lead = where.shape[:-1]
    starts = jnp.stack(jnp.broadcast_arrays(layer, where, jnp.int32(first)), axis=-1)
    at = len(lead)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(at, at + 2, at + 3),
        collapsed_slice_dims=(0, 1),
        start_index_map=(0, 1, 4),
    )
    sizes = (1, 1, kv_heads, block_size, width)
    found = jax.lax.gather(kv, starts, numbers, sizes, mode=jax.lax.GatherScatterMode.CLIP)
    return found.reshape(*lead, kv_heads, -1, width)


def _read_whole(kv: jax.Array, layer: jax.Array, where: jax.Array, *, first: int) -> jax.Array:
    kv_heads, width = kv.shape[2], kv.shape[4] // 2
    pages = jnp.swapaxes(kv[layer, where], -4, -3)  # [..., K, blocks, block_size, 2H]
    pages = pages.reshape(*where.shape[:-1], kv_heads, -1, 2 * width)
    return pages[..., first : first + width]


def _blocks(span: int, block_size: int) -> int:
    """Blocks of a turn of about `span` positions; of twice the span, twice as many."""
    return max(1, DECODE_SPAN // block_size) * (span // DECODE_SPAN)


def _pad_to_span(tables: jax.Array, blocks: int) -> jax.Array:
    """Tables whose width is a multiple of `blocks`; block 0 is as good as any, it is masked."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % blocks)))


def _decode(q: jax.Array, kv: jax.Array, layer: jax.Array, batch: Rows, mask: Mask) -> jax.Array:
    """Attention of the rows of one query: row b is token b.  All other tokens come out zero."""
    num_tokens, heads, width = q.shape
    kv_heads, block_size = kv.shape[2:4]
    blocks = _blocks(DECODE_SPAN, block_size)
    span = blocks * block_size
    rows = min(len(batch.kv_lens), num_tokens)
    full, small = min(DECODE_ROWS[0], rows), DECODE_ROWS[1]
    lens = jnp.where(jnp.arange(rows) < batch.num_decodes, batch.kv_lens[:rows], 0)
    # Longest first, so that the rows of a group have nearly equal contexts.
    lens, order = jax.lax.sort_key_val(-lens, jnp.arange(rows))
    lens, order = jnp.pad(-lens, (0, -rows % full)), jnp.pad(order, (0, -rows % full))
    tables = _pad_to_span(batch.block_tables, blocks)[order]
    queries = q[order].reshape(-1, kv_heads, heads // kv_heads, width).astype(jnp.float32)

    def group(index, out, *, first, size):
        start = first + index * size
        group_q = jax.lax.dynamic_slice_in_dim(queries, start, size)
        group_tables = jax.lax.dynamic_slice_in_dim(tables, start, size)
        group_lens = jax.lax.dynamic_slice_in_dim(lens, start, size)
        low = jnp.zeros((), jnp.int32)
        if mask.window is not None:
            firsts = jnp.where(group_lens > 0, group_lens - mask.window, group_lens[0])
            low = jnp.maximum(jnp.min(firsts), 0) // span

        def turn(index, state):
            where = jax.lax.dynamic_slice_in_dim(group_tables, index * blocks, blocks, axis=1)
            # With so few queries a row the matmuls are faster in float32 (measured on a CPU).
            k = _gather(kv, layer, where, 0).astype(jnp.float32)  # [size, K, span, H]
            v = _gather(kv, layer, where, width).astype(jnp.float32)
            positions = index * span + jnp.arange(span)
            written = positions < group_lens[:, None]
            seen = written
            if mask.window is not None:
                seen &= positions >= group_lens[:, None] - mask.window
            v = jnp.where(written[:, None, :, None], v, 0)
            return _turn(state, group_q, k, v, seen[:, None, None], mask)

        state = jax.lax.fori_loop(low, -(-group_lens[0] // span), turn, _empty(group_q))
        return jax.lax.dynamic_update_slice_in_dim(out, _result(state), start, axis=0)

    # What is left over is walked in small groups where it is at most half of a full one.
    count, half = jnp.minimum(batch.num_decodes, rows), full // 2 if small < full else 0
    groups = (count + full - 1 - half) // full
    walk = functools.partial(group, first=0, size=full)
    out = jax.lax.fori_loop(0, groups, walk, jnp.zeros_like(queries))
    if half:
        done = groups * full
        walk = functools.partial(group, first=done, size=small)
        out = jax.lax.fori_loop(0, -(-(count - done) // small), walk, out)
    out = out[:rows].reshape(rows, heads, width).astype(q.dtype)
    return jnp.zeros_like(q).at[order[:rows]].set(out, unique_indices=True)


def _chunks(
    out: jax.Array, q: jax.Array, kv: jax.Array, layer: jax.Array, rows: Rows, mask: Mask
) -> jax.Array:
    """`out` with the rows of many queries filled in, tile by tile of queries of one row."""
    num_tokens = len(q)
    tables = _pad_to_span(rows.block_tables, _blocks(WHOLE_SPAN, kv.shape[3]))
    rows = rows._replace(block_tables=tables)
    *large, (smallest, narrow) = CHUNK_TILES
    kinds = [kind for kind in large if kind[0] <= num_tokens]
    kinds.append((min(smallest, num_tokens), narrow))
    padding = ((0, kinds[0][0]), (0, 0), (0, 0))
    q, out = jnp.pad(q, padding), jnp.pad(out, padding)
    counts = chunk_tiles(rows, tuple(size for size, _ in kinds))
    firsts = rows.query_starts[:-1]
    for (size, span), tiles in zip(kinds, counts, strict=True):
        out = _tiles(out, q, kv, layer, rows, mask, Tiles(size, span, tiles, firsts))
        firsts = firsts + tiles * size
    return out[:num_tokens]


def _tiles(  # noqa: PLR0913  a step's arrays, and the plan
    out: jax.Array,
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    rows: Rows,
    mask: Mask,
    plan: Tiles,
) -> jax.Array:
    """`out` with the tiles of one size filled in; q and out are padded by at least that size."""
    ends = jnp.cumsum(plan.counts)

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(ends <= index)
        start = plan.firsts[row] + (index - ends[row] + plan.counts[row]) * plan.size
        end = rows.query_starts[row + 1]
        tile = jax.lax.dynamic_slice_in_dim(q, start, plan.size)
        result = _tile(tile, kv, layer, rows, mask, (row, start, plan.span))
        old = jax.lax.dynamic_slice_in_dim(out, start, plan.size)  # what lies past the row's end
        inside = (start + jnp.arange(plan.size) < end)[:, None, None]
        result = jnp.where(inside, result.astype(out.dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    return jax.lax.fori_loop(0, ends[-1], one_tile, out)


def _tile(  # noqa: PLR0913  a step's arrays, and which tile
    q: jax.Array,  # [Q, N, H]  queries of one row; what lies past its end gives garbage
    kv: jax.Array,
    layer: jax.Array,
    rows: Rows,
    mask: Mask,
    place: tuple[jax.Array, jax.Array, int],  # row, index in T of the first query, span
) -> jax.Array:  # f32[Q, N, H]
    row, start, span = place
    size, heads, width = q.shape
    kv_heads, block_size = kv.shape[2:4]
    span, whole_span = (_blocks(one, block_size) * block_size for one in (span, WHOLE_SPAN))
    length = rows.kv_lens[row]
    first = length - (rows.query_starts[row + 1] - start)  # position of the first query
    at = first + jnp.arange(size)
    folded = q.reshape(size, kv_heads, -1, width).transpose(1, 2, 0, 3)
    folded = folded.reshape(kv_heads, -1, width)

    def turn(index: jax.Array, state: Softmax, *, span: int, whole: bool) -> Softmax:
        blocks = span // block_size
        where = jax.lax.dynamic_slice(rows.block_tables, (row, index * blocks), (1, blocks))[0]
        k = _gather(kv, layer, where, 0).astype(q.dtype)  # [K, span, H]
        v = _gather(kv, layer, where, width).astype(q.dtype)
        if whole:
            return _turn(state, folded, k, v, None, mask)
        positions = index * span + jnp.arange(span)
        seen = positions <= at[:, None]
        if mask.window is not None:
            seen &= positions > at[:, None] - mask.window
        seen = jnp.tile(seen, (heads // kv_heads, 1))
        v = jnp.where((positions < length)[:, None], v, 0)
        return _turn(state, folded, k, v, seen, mask)

    end, state = jnp.minimum(first + size, length), _empty(folded)
    if mask.window is None:  # every query sees all of the spans before the tile: nothing to mask
        before = (first + 1) // whole_span
        walk = functools.partial(turn, span=whole_span, whole=True)
        state = jax.lax.fori_loop(0, before, walk, state)
        low = before * (whole_span // span)
    else:
        low = jnp.maximum(first + 1 - mask.window, 0) // span
    walk = functools.partial(turn, span=span, whole=False)
    state = jax.lax.fori_loop(low, -(-end // span), walk, state)
    result = _result(state).reshape(kv_heads, heads // kv_heads, size, width)
    return result.transpose(2, 0, 1, 3).reshape(size, heads, width)


def _empty(q: jax.Array) -> Softmax:
    total = jnp.zeros((*q.shape[:-1], 1), jnp.float32)
    return Softmax(jnp.zeros(q.shape, jnp.float32), total, total - jnp.inf)


def _turn(
    state: Softmax,
    q: jax.Array,  # [..., Q, H]
    k: jax.Array,  # [..., span, H]
    v: jax.Array,  # [..., span, H]  zero where nothing is written: 0 x NaN is NaN
    seen: jax.Array | None,  # bool[..., Q, span]  query sees position; None: all of them
    mask: Mask,
) -> Softmax:
    """Adds one span to the state."""
    scores = jnp.einsum("...qh,...sh->...qs", q, k, preferred_element_type=jnp.float32) * mask.scale
    if mask.soft_cap is not None:
        scores = mask.soft_cap * jnp.tanh(scores / mask.soft_cap)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    shape, single = scores.shape, state.top.shape
    scores = _lines(scores)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1).reshape(single))
    safe = jnp.where(top == -jnp.inf, 0.0, top)  # nothing seen yet: exp(-inf - 0) is 0
    weights = _lines(jnp.exp(scores - safe.reshape(-1, 1)).astype(v.dtype))
    keep = jnp.exp(state.top - safe)
    sums = jnp.einsum(
        "...qs,...sh->...qh", weights.reshape(shape), v, preferred_element_type=jnp.float32
    )
    total = state.total * keep + jnp.sum(weights, axis=-1, dtype=jnp.float32).reshape(single)
    return Softmax(state.values * keep + sums, total, top)


def _lines(x: jax.Array) -> jax.Array:
    """[..., span] as [lines, span].

    XLA's CPU back end shares an operation out among threads along its first axis: of 3 kv heads one
    thread gets twice as much as the other.  Without the barrier the axes come back.
    """
    lines = x.reshape(-1, x.shape[-1])
    if len(lines) < _MANY_LINES:
        return lines
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(lines, cpu=barrier, default=lambda lines: lines)


def _result(state: Softmax) -> jax.Array:
    """Weighted mean in float32; zero where nothing was seen."""
    return state.values / jnp.where(state.total == 0.0, 1.0, state.total)
