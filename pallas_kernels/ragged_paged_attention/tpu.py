"""Ragged paged attention for the TPU (Pallas Mosaic): packs of decode rows, tiles of chunks.

A grid step of the decode kernel holds a few rows; a turn copies some blocks of each, all kv heads
at once, and multiplies all heads of a row with the blocks of all kv heads in one matmul, whose
entries of other heads are masked: many rows in the matmul instead of one group.  A grid step of the
tile kernel holds one tile of queries, a matmul a kv head.  Copies run one turn ahead (`stream`).

Where H is no multiple of 128 lanes, queries are padded with zeros to 2H: q . [k | v] = q . k, and
of p . [k | v] the right half counts.  So nothing is ever sliced within a tile of lanes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import plan, stream, tuning
from pallas_kernels.ragged_paged_attention.plan import Mask, Rows
from pallas_kernels.ragged_paged_attention.tuning import Problem, Sizes

LOWEST = -1e30  # below every score; finite, so that nothing is ever inf - inf
LEAST_VMEM = 16 * tuning.MIB  # what a kernel may always have
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


def unsupported(q: Any, kv: Any, block_tables: Any) -> str | None:
    """Why these shapes cannot run here, or None."""
    problem = Problem.of(q, kv)
    if problem.head_dim % 64:
        return f"head_dim {problem.head_dim} is no multiple of 64: XLA would copy the whole KV"
    lines = 32 // kv.dtype.itemsize
    if problem.block_size % lines:
        return f"block_size {problem.block_size} is no multiple of {lines}, a tile of {kv.dtype}"
    sizes = tuning.tpu_sizes(problem)
    need = max(tuning.decode_vmem(problem, sizes), tuning.tile_vmem(problem, sizes, sizes.tiles[0]))
    if need > 4 * tuning.VMEM_BUDGET:
        return f"blocks of {problem.block_size} tokens need {need >> 20} MiB of VMEM"
    if 4 * block_tables.size > tuning.SMEM_BUDGET:
        return (
            f"block tables of {block_tables.shape} exceed {tuning.SMEM_BUDGET >> 10} KiB of SMEM; "
            "use larger blocks or fewer rows"
        )
    return None


def ragged_paged_attention(  # noqa: PLR0913  a step's arrays, and how to run
    q: jax.Array,  # [T, N, H]
    kv: jax.Array,  # [L, blocks, K, block_size, 2H]
    layer: jax.Array,  # i32[]
    rows: Rows,
    mask: Mask,
    factors: jax.Array | None = None,  # f32[K, 2]  k and v are the stored values times these
    *,
    sizes: Sizes | None = None,
    interpret: Any = False,
) -> jax.Array:  # [T, N, H]
    """See `api`."""
    sizes = sizes or tuning.tpu_sizes(Problem.of(q, kv), tuning.device_kind())
    tables = jnp.clip(rows.block_tables, 0, kv.shape[1] - 1)
    rows = rows._replace(block_tables=tables)
    if factors is None:
        factors = jnp.ones((kv.shape[2], 2), jnp.float32)
    call = _Call(q, kv, jnp.asarray(layer, jnp.int32).reshape(1), rows, mask, factors)
    out = _decode(call, sizes, interpret)
    per_row = plan.chunk_tiles(rows, len(q), sizes.tiles)
    starts = rows.query_starts[:-1]
    for size, tiles in zip(sizes.tiles, per_row, strict=True):
        run = functools.partial(_tiles, call, sizes, size, interpret)
        out = lax.cond(jnp.sum(tiles) > 0, run, lambda *operands: operands[-1], tiles, starts, out)
        starts = starts + tiles * size
    return out


class _Call(NamedTuple):
    q: jax.Array
    kv: jax.Array
    layer: jax.Array
    rows: Rows
    mask: Mask
    factors: jax.Array

    def options(self) -> Options:
        group = self.q.shape[1] // self.kv.shape[2]
        table_width = self.rows.block_tables.shape[1]
        return Options(group, self.q.shape[2], self.mask.scale, self.mask.soft_cap, table_width)


def lane_width(head_dim: int) -> int:
    """Minor axis W of queries and outputs in the kernels."""
    return head_dim if head_dim % 128 == 0 else 2 * head_dim


def _decode(call: _Call, sizes: Sizes, interpret: Any) -> jax.Array:
    """Attention of the rows of one query; zero for all other tokens."""
    num_tokens, heads, width = call.q.shape
    kv_heads, block_size = call.kv.shape[2:4]
    size, blocks = sizes.decode_rows, sizes.decode_blocks(block_size)
    packs = plan.decode_packs(call.rows, num_tokens, size, blocks * block_size, call.mask)
    bound = len(packs.first_turns)
    lanes = lane_width(width)
    padding = ((0, max(0, (bound + 1) * size - num_tokens)), (0, 0), (0, lanes - width))
    queries = jnp.pad(call.q, padding)[: (bound + 1) * size]
    factors = jnp.repeat(call.factors, heads // kv_heads, axis=0)
    out = _call_kernel(
        functools.partial(_decode_kernel, call.options()),
        name="ragged_paged_attention_decode",
        count=packs.count,
        scalars=(*packs[1:], call.layer, call.rows.block_tables.reshape(-1)),
        inputs=(queries.reshape(bound + 1, size, heads, lanes), factors, call.kv),
        scratch=_scratch((size, heads, lanes), (size, kv_heads, blocks, *call.kv.shape[3:]), call),
        vmem=tuning.decode_vmem(Problem.of(call.q, call.kv), sizes),
        cores=sizes.cores,
        interpret=interpret,
    )
    out = out.reshape(-1, heads, lanes)[:num_tokens, :, lanes - width :]
    out = jnp.pad(out, ((0, num_tokens - len(out)), (0, 0), (0, 0)))
    real = jnp.arange(num_tokens) < jnp.minimum(call.rows.num_decodes, len(call.rows.kv_lens))
    return jnp.where(real[:, None, None], out, 0)


def _tiles(  # noqa: PLR0913  a step's arrays, and how to run
    call: _Call,
    sizes: Sizes,
    size: int,
    interpret: Any,
    per_row: jax.Array,  # i32[B]
    starts: jax.Array,  # i32[B]
    out: jax.Array,  # [T, N, H]
) -> jax.Array:
    """`out` with the queries in tiles of one size filled in."""
    num_tokens, heads, width = call.q.shape
    kv_heads, block_size = call.kv.shape[2:4]
    blocks = sizes.tile_blocks(block_size)
    span = blocks * block_size
    tiles = plan.lay_tiles(call.rows, per_row, starts, num_tokens, size, span, call.mask)
    bound, lanes, group = len(tiles.rows), lane_width(width), heads // kv_heads
    where = jnp.pad(tiles.queries, (0, 1))[:, None] + jnp.arange(size)
    queries = call.q[jnp.minimum(where, num_tokens - 1)]
    queries = queries.reshape(bound + 1, size, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(bound + 1, kv_heads, group * size, width)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, lanes - width)))
    window = plan.NO_WINDOW if call.mask.window is None else call.mask.window
    window = jnp.asarray(window, jnp.int32).reshape(1)
    result = _call_kernel(
        functools.partial(_tile_kernel, call.options()),
        name="ragged_paged_attention_tiles",
        count=tiles.count,
        scalars=(
            *(tiles.rows, tiles.positions, tiles.ends, tiles.first_turns, tiles.end_turns),
            *(window, call.layer, call.rows.block_tables.reshape(-1)),
        ),
        inputs=(queries, call.factors, call.kv),
        scratch=_scratch(
            (kv_heads, group * size, lanes), (1, kv_heads, blocks, *call.kv.shape[3:]), call
        ),
        vmem=tuning.tile_vmem(Problem.of(call.q, call.kv), sizes, size),
        cores=sizes.cores,
        interpret=interpret,
    )
    result = result[..., lanes - width :].reshape(bound + 1, kv_heads, group, size, width)
    result = result.transpose(0, 3, 1, 2, 4).reshape(-1, heads, width)
    inside = (tiles.places < bound * size)[:, None, None]
    return jnp.where(inside, result[tiles.places], out)


def _scratch(state: tuple[int, ...], turn: tuple[int, ...], call: _Call) -> list[Any]:
    return [
        pltpu.VMEM((2, *turn), call.kv.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM(state, jnp.float32),
        pltpu.VMEM((*state[:-1], 1), jnp.float32),
        pltpu.VMEM((*state[:-1], 1), jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
    ]


def _call_kernel(  # noqa: PLR0913  what two kernels share, and where they differ
    kernel: Any,
    *,
    name: str,
    count: jax.Array,
    scalars: tuple[jax.Array, ...],
    inputs: tuple[jax.Array, jax.Array, jax.Array],  # queries by piece, factors, KV
    scratch: list[Any],
    vmem: int,
    cores: int,
    interpret: Any,
) -> jax.Array:
    """Runs the kernel on `count` pieces; the last piece of the queries is a spare."""
    queries = inputs[0]
    spare = len(queries) - 1
    per_core = -(-count // cores)
    scalars = (jnp.stack([count, per_core]), *scalars)

    def piece(core, index, sizes, *_):
        place = core * sizes[1] + index
        return jnp.where(place < sizes[0], place, spare)

    def whole(*places):
        return (piece(*places), *(0,) * (queries.ndim - 1))

    block = pl.BlockSpec((1, *queries.shape[1:]), whole)
    factors = pl.BlockSpec(memory_space=pltpu.VMEM if "decode" in name else pltpu.SMEM)
    return pl.pallas_call(
        kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, per_core),
            in_specs=[block, factors, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=max(vmem, LEAST_VMEM),
        ),
        interpret=interpret,
    )(*scalars, *inputs)


def _decode_kernel(  # noqa: PLR0913  refs in the order of the call
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
    stream.walk(
        count[0],
        (first_turns, end_turns),
        parity,
        functools.partial(copy, lambda one: one.start()),
        functools.partial(copy, lambda one: one.wait()),
        compute,
    )
    for index in range(size):
        result = _result(state, index) * factors[:, 1:]
        out[0, index] = result.astype(out.dtype)


def _tile_kernel(  # noqa: PLR0913  refs in the order of the call
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
    stream.walk(
        count[0],
        (first_turns, end_turns),
        parity,
        functools.partial(copy, lambda one: one.start()),
        functools.partial(copy, lambda one: one.wait()),
        compute,
    )

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
