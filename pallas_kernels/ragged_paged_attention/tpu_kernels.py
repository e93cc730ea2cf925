"""Bodies of the TPU attention kernels: what one grid step does with its turns."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention import stream

LOWEST = -1e30  # below every score; finite, so that nothing is ever inf - inf
Ref = Any


class State(NamedTuple):
    """Online softmax (arXiv 2205.14135) in VMEM; the leading axis is rows or kv heads."""

    values: Ref  # f32[..., lines, W]
    total: Ref  # f32[..., lines, 1]
    top: Ref  # f32[..., lines, 1]


class Options(NamedTuple):
    """What is fixed when a kernel is compiled."""

    group: int  # N / K
    width: int  # H
    scale: Any
    soft_cap: float | None
    table_width: int


def decode_kernel(  # noqa: PLR0913  refs in the order of the call
    options: Options,
    count: Ref,  # i32[2]
    lens: Ref,  # i32[packs * rows]
    lows: Ref,
    first_turns: Ref,  # i32[packs]
    end_turns: Ref,
    layer: Ref,
    tables: Ref,
    q: Ref,  # [1, rows, N, W]
    factors: Ref,  # f32[N, 2]
    kv: Ref,
    out: Ref,  # [1, rows, N, W]
    buffer: Ref,
    semaphores: Ref,
    values: Ref,
    total: Ref,
    top: Ref,
    parity: Ref,
) -> None:
    size, heads = q.shape[1:3]
    kv_heads, blocks, block_size = buffer.shape[2:5]
    span = blocks * block_size
    state = State(values, total, top)
    source = stream.Source(kv, layer, tables, options.table_width, buffer, semaphores)
    piece = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    score_factor = factors[:, :1] * options.scale
    column = lax.broadcasted_iota(jnp.int32, (heads, kv_heads * span), 1)
    line = lax.broadcasted_iota(jnp.int32, (heads, kv_heads * span), 0)
    own_head = lax.div(column, span) == lax.div(line, options.group)
    offset = lax.rem(column, span)
    deep = lax.rem(lax.broadcasted_iota(jnp.int32, (kv_heads * span, 1), 0), span)

    def copy(action, pack, turn, slot):
        for index in range(size):
            row = pack * size + index
            limits = (lows[row], lens[row])
            stream.transfer(source, action, slot, index, row, turn, limits)

    def add(index, turn, slot, masked):
        row = piece * size + index
        pages = buffer[slot, index].reshape(kv_heads * span, 2 * options.width)
        low, end = lows[row] - turn * span, lens[row] - turn * span
        kept = (deep >= low) & (deep < end) if masked else None
        k, v = _halves(pages, q.dtype, kept)
        scores = _shape_scores(_matmul(q[0, index], k, 1), score_factor, options)
        seen = own_head & (offset >= low) & (offset < end) if masked else own_head
        _accumulate(state, index, scores, seen, v)

    def compute(turn, slot):
        ends = [lens[piece * size + index] - turn * span for index in range(size)]
        begins = [lows[piece * size + index] - turn * span for index in range(size)]
        whole = functools.reduce(jnp.minimum, ends) >= span
        whole &= functools.reduce(jnp.maximum, begins) <= 0

        @pl.when(whole)
        def _():
            for index in range(size):
                add(index, turn, slot, masked=False)

        for index in range(size):
            alive = (ends[index] > 0) & (begins[index] < span)
            pl.when(~whole & alive)(functools.partial(add, index, turn, slot, masked=True))

    _reset(state)
    stream.walk(count[0], (first_turns, end_turns), parity, copy, compute)
    for index in range(size):
        result = _result(state, index) * factors[:, 1:]
        out[0, index] = result.astype(out.dtype)


def tile_kernel(  # noqa: PLR0913  refs in the order of the call
    options: Options,
    count: Ref,  # i32[2]
    rows: Ref,  # i32[tiles]
    positions: Ref,
    ends: Ref,
    first_turns: Ref,
    end_turns: Ref,
    window: Ref,  # i32[1]
    layer: Ref,
    tables: Ref,
    q: Ref,  # [1, K, group * size, W]  head by head, a head's queries in a row
    factors: Ref,  # f32[K, 2]
    kv: Ref,
    out: Ref,
    buffer: Ref,
    semaphores: Ref,
    values: Ref,
    total: Ref,
    top: Ref,
    parity: Ref,
) -> None:
    kv_heads, lines = q.shape[1:3]
    size = lines // options.group
    blocks, block_size = buffer.shape[3:5]
    span = blocks * block_size
    state = State(values, total, top)
    source = stream.Source(kv, layer, tables, options.table_width, buffer, semaphores)
    piece = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    first, end = positions[piece], ends[piece]
    query = lax.rem(lax.broadcasted_iota(jnp.int32, (lines, span), 0), size)
    column = lax.broadcasted_iota(jnp.int32, (lines, span), 1)
    ahead = column - query  # position of the column relative to that of the query, at turn 0
    deep = lax.broadcasted_iota(jnp.int32, (span, 1), 0)

    def copy(action, tile, turn, slot):
        low = jnp.maximum(positions[tile] + 1 - window[0], 0)
        stream.transfer(source, action, slot, 0, rows[tile], turn, (low, ends[tile]))

    def add(turn, slot, masked):
        shift = first - turn * span  # of the first query, from the turn's first position
        low = jnp.maximum(shift + 1 - window[0], -turn * span)
        kept = (deep >= low) & (deep < end - turn * span) if masked else None
        seen = (ahead <= shift) & (ahead > shift - window[0]) if masked else None

        def head(index, carry):
            pages = buffer[slot, 0, index].reshape(span, 2 * options.width)
            k, v = _halves(pages, q.dtype, kept)
            scores = _matmul(q[0, index], k, 1)
            scores = _shape_scores(scores, factors[index, 0] * options.scale, options)
            _accumulate(state, index, scores, seen, v)
            return carry

        lax.fori_loop(0, kv_heads, head, 0, unroll=kv_heads <= 8)

    def compute(turn, slot):
        whole = (turn + 1) * span <= first + 1
        whole &= turn * span > first + size - 1 - window[0]
        pl.when(whole)(functools.partial(add, turn, slot, masked=False))
        pl.when(~whole)(functools.partial(add, turn, slot, masked=True))

    _reset(state)
    stream.walk(count[0], (first_turns, end_turns), parity, copy, compute)

    def finish(index, carry):
        out[0, index] = (_result(state, index) * factors[index, 1]).astype(out.dtype)
        return carry

    lax.fori_loop(0, kv_heads, finish, 0)


def _halves(pages: jax.Array, dtype: Any, kept: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """K and V [span, W] of pages [span, 2H] in the dtype of the queries; V is zero but where kept.

    0 x NaN is NaN: what nobody sees must be a number.
    """
    width = pages.shape[-1] // 2
    if pages.dtype.itemsize == 1:
        pages = pages.astype(jnp.float32)
    pages = pages.astype(dtype)
    k, v = (pages[:, :width], pages[:, width:]) if width % 128 == 0 else (pages, pages)
    if kept is not None:  # in float32: not every chip selects in 16 bits
        v = jnp.where(kept, v.astype(jnp.float32), 0.0).astype(dtype)
    return k, v


def _matmul(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a . b over the last axis of a and `axis` of b, exact in float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _shape_scores(scores: jax.Array, factor: Any, options: Options) -> jax.Array:
    scores = scores * factor
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores * (1 / options.soft_cap))
    return scores


def _reset(state: State) -> None:
    state.values[...] = jnp.zeros(state.values.shape, jnp.float32)
    state.total[...] = jnp.zeros(state.total.shape, jnp.float32)
    state.top[...] = jnp.full(state.top.shape, LOWEST, jnp.float32)


def _accumulate(
    state: State, at: Any, scores: jax.Array, seen: jax.Array | None, v: jax.Array
) -> None:
    """Adds scores [lines, span] and values [span, W] to the state of `at`."""
    if seen is not None:
        scores = jnp.where(seen, scores, LOWEST)
    before = state.top[at]
    top = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    keep = jnp.exp(before - top)
    state.top[at] = top
    state.total[at] = state.total[at] * keep + jnp.sum(weights, axis=-1, keepdims=True)
    state.values[at] = state.values[at] * keep + _matmul(weights.astype(v.dtype), v, 0)


def _result(state: State, at: Any) -> jax.Array:
    """Weighted mean; zero where nothing was seen."""
    total = state.total[at]
    return state.values[at] / jnp.where(total == 0.0, 1.0, total)
