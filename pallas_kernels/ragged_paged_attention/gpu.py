"""Ragged paged attention for Hopper GPUs (Pallas Mosaic GPU): TMA copies, wgmma matmuls.

One warpgroup works on one piece: up to 64 lines (queries x heads that share a kv head) against a
part of one row's context and, where H is 256, half of the columns of V.  A decode's context is
split into parts, so that few rows fill the chip; `combine` joins them.  Float32 and head sizes not
listed here take XLA (`unsupported`), and so must other GPUs (`api.unsupported_device`): nobody can
tell them apart in a step.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic_gpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention import plan
from pallas_kernels.ragged_paged_attention.call import Call
from pallas_kernels.ragged_paged_attention.combine import combine
from pallas_kernels.ragged_paged_attention.plan import Mask, Pieces, Rows
from pallas_kernels.ragged_paged_attention.tuning import GpuSizes, Problem, gpu_sizes

plgpu: Any = mosaic_gpu  # whose types do not say what it exports
LINES = 64  # of one wgmma
SHARE = 128  # most columns of V that one warpgroup has registers for; others take the rest
COLUMNS = 64  # of V at a time: the products of a turn then need few registers
LOWEST = -1e30
Ref = Any


class Options(NamedTuple):
    """What is fixed when a kernel is compiled."""

    tile: int  # queries a piece
    blocks: int  # a turn
    scale: Any
    soft_cap: float | None
    interpret: Any


def unsupported(q: Any, kv: Any, block_tables: Any) -> str | None:
    """Why these shapes cannot run here, or None."""
    del block_tables
    problem = Problem.of(q, kv)
    if problem.head_dim not in (64, 128, 256):
        return f"head_dim {problem.head_dim} is none of 64, 128, 256"
    if problem.q_dtype not in ("bfloat16", "float16") or problem.kv_dtype not in (
        *(problem.q_dtype, "int8", "float8_e4m3fn", "float8_e5m2"),
    ):
        return f"{problem.q_dtype} queries over {problem.kv_dtype} KV have no wgmma"
    if problem.heads // problem.kv_heads > LINES:
        return f"more than {LINES} heads share a kv head"
    size = problem.block_size
    if size % 8 or (size > 64 and size % 64) or (size < 64 and 64 % size):
        return f"block_size {size} is none of 8, 16, 32, or a multiple of 64"
    if 2 * max(64, size) * 4 * problem.head_dim > 160 * 2**10:
        return f"blocks of {size} tokens do not fit in shared memory"
    return None


def ragged_paged_attention(  # noqa: PLR0913  a step's arrays, and how to run
    q: jax.Array,  # [T, N, H]
    kv: jax.Array,  # [L, blocks, K, block_size, 2H]
    layer: jax.Array,  # i32[]
    rows: Rows,
    mask: Mask,
    factors: jax.Array | None = None,  # f32[K, 2]  k and v are the stored values times these
    *,
    sizes: GpuSizes | None = None,
    interpret: Any = None,
) -> jax.Array:  # [T, N, H]
    """See `api`."""
    sizes = sizes or gpu_sizes(Problem.of(q, kv), min(len(rows.kv_lens), len(q)))
    call = Call.of(q, kv, layer, rows, mask, factors)
    out = _decode(call, sizes, interpret)
    tile = LINES // call.group
    (per_row,) = plan.chunk_tiles(rows, (tile,))
    run = functools.partial(_tiles, call, sizes, tile, interpret)
    return lax.cond(jnp.sum(per_row) > 0, run, lambda *operands: operands[-1], per_row, out)


def _decode(call: Call, sizes: GpuSizes, interpret: Any) -> jax.Array:
    """Attention of the rows of one query; zero for all other tokens."""
    num_tokens, heads, width = call.q.shape
    kv_heads, block_size = call.kv.shape[2:4]
    bound = min(len(call.rows.kv_lens), num_tokens)
    blocks = sizes.blocks(block_size)
    span = blocks * block_size
    parts = (sizes.parts, sizes.part_turns)
    pieces = plan.decode_parts(call.rows, bound, parts, span, call.window)
    group = call.group
    lines = -(-group // 8) * 8
    queries = call.q[:bound].reshape(bound, kv_heads, group, width)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, lines - group), (0, 0)))
    options = Options(1, blocks, call.mask.scale, call.mask.soft_cap, interpret)
    values, top, total = _run(call, pieces, queries, options, split=True)
    shape = (bound, sizes.parts, kv_heads, lines)
    values, top, total = values.reshape(*shape, width), top.reshape(shape), total.reshape(shape)
    out = combine(
        values, top, total, (pieces.end_turns > pieces.first_turns).reshape(shape[:2] + (1, 1))
    )
    out = (out * call.factors[:, 1, None, None])[:, :, :group].reshape(bound, heads, width)
    return jnp.pad(out.astype(call.q.dtype), ((0, num_tokens - bound), (0, 0), (0, 0)))


def _tiles(
    call: Call, sizes: GpuSizes, tile: int, interpret: Any, per_row: jax.Array, out: jax.Array
) -> jax.Array:
    """`out` with the rows of many queries filled in."""
    num_tokens, heads, width = call.q.shape
    kv_heads, block_size = call.kv.shape[2:4]
    blocks, group = sizes.blocks(block_size), call.group
    span = blocks * block_size
    starts = call.rows.query_starts[:-1]
    tiles = plan.lay_tiles(call.rows, per_row, starts, num_tokens, tile, span, call.window)
    bound = len(tiles.rows)
    pieces = Pieces(
        rows=tiles.rows,
        positions=tiles.positions,
        ends=tiles.ends,
        lows=jnp.maximum(tiles.positions + 1 - call.window, 0),
        first_turns=tiles.first_turns,
        end_turns=tiles.end_turns,
        windows=jnp.broadcast_to(call.window, bound),
    )
    where = tiles.queries[:, None] + jnp.arange(tile)
    queries = call.q[jnp.minimum(where, num_tokens - 1)]
    queries = queries.reshape(bound, tile, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(bound, kv_heads, group * tile, width)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, LINES - group * tile), (0, 0)))
    options = Options(tile, blocks, call.mask.scale, call.mask.soft_cap, interpret)
    (result,) = _run(call, pieces, queries, options, split=False)
    result = result[:, :, : group * tile].reshape(bound, kv_heads, group, tile, width)
    result = result.transpose(0, 3, 1, 2, 4).reshape(-1, heads, width)
    inside = (tiles.places < bound * tile)[:, None, None]
    return jnp.where(inside, result[tiles.places], out)


def _run(
    call: Call, pieces: Pieces, queries: jax.Array, options: Options, *, split: bool
) -> list[jax.Array]:
    """Runs the kernel; split: unnormalised float32 values, top and total, else the output.

    Pieces without a turn leave their output as it is: anything.
    """
    count = len(pieces.rows)
    kv_heads, lines, width = queries.shape[1:]
    share = min(width, SHARE)
    dtype = queries.dtype
    span = options.blocks * call.kv.shape[3]
    if split:
        out_type = [
            jax.ShapeDtypeStruct((count, kv_heads, lines, width), jnp.float32),
            jax.ShapeDtypeStruct((count, kv_heads, lines), jnp.float32),
            jax.ShapeDtypeStruct((count, kv_heads, lines), jnp.float32),
        ]
        outs = [
            _buffer((LINES, COLUMNS), jnp.float32),
            plgpu.SMEM((LINES,), jnp.float32),
            plgpu.SMEM((LINES,), jnp.float32),
        ]
    else:
        out_type = [jax.ShapeDtypeStruct((count, kv_heads, lines, width), dtype)]
        outs = [_buffer((LINES, COLUMNS), dtype)]
    scratch = [
        _buffer((LINES, width), dtype),
        [_buffer((2, span, columns), call.kv.dtype) for columns in (width, share)],
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=2 * options.blocks, num_barriers=2),
        outs,
        # One-byte KV in the dtype of the queries, as wgmma wants both operands.
        [_buffer((span, columns), dtype) for columns in (width, share)]
        if call.kv.dtype.itemsize == 1
        else [],
        # The interpreter takes the left operand of wgmma from shared memory only.
        [_buffer((LINES, span), dtype)] if options.interpret else [],
    ]
    return plgpu.kernel(
        functools.partial(_kernel, options, call.rows.block_tables.shape[1], split),
        out_type=out_type,
        grid=(width // share, kv_heads, count),
        grid_names=("share", "head", "piece"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=False),
        interpret=options.interpret,
    )(
        *(queries, call.kv, call.rows.block_tables, jnp.stack(pieces, 1)),
        *(call.layer, call.factors),
    )


def _buffer(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in tiles that TMA and wgmma agree on: 8 lines x at most 128 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    size = min(128, COLUMNS * itemsize)
    tiles = (plgpu.TilingTransform((8, size // itemsize)), plgpu.SwizzleTransform(size))
    return plgpu.SMEM(shape, dtype, transforms=tiles)


def _kernel(  # noqa: C901, PLR0913, PLR0915  one kernel; refs in the order of the call
    options: Options,
    table_width: int,
    split: bool,
    q_ref: Ref,  # [pieces or rows, K, lines, H]
    kv_ref: Ref,
    tables_ref: Ref,
    pieces_ref: Ref,
    layer_ref: Ref,
    factors_ref: Ref,
    *refs: Ref,
) -> None:
    num_outs = 3 if split else 1
    outs = refs[:num_outs]
    q, (k, v), q_barrier, kv_barriers, out, widened, weights_ref = refs[num_outs:]
    head, piece = lax.axis_index("head"), lax.axis_index("piece")
    lines, width = q_ref.shape[2:]
    block_size, blocks = kv_ref.shape[3], options.blocks
    span = blocks * block_size
    row, position, end, low, first, last, window = (pieces_ref[piece, i] for i in range(7))
    layer = layer_ref[0]
    layout = plgpu.Layout.WGMMA
    by_line = layout.reduce(1)
    part = pl.ds(0, lines)
    share = v.shape[-1]
    first_column = lax.axis_index("share") * share
    columns = range(0, share, COLUMNS)

    def fetch(turn, slot):
        for index in range(blocks):
            # What lies past the context is masked: copy the last block again.
            at = jnp.minimum(turn * blocks + index, lax.div(end - 1, block_size))
            block = tables_ref[row, jnp.minimum(at, table_width - 1)]
            place = pl.ds(index * block_size, block_size)
            for start, target in ((0, k), (width + first_column, v)):
                plgpu.copy_gmem_to_smem(
                    kv_ref.at[layer, block, head, :, pl.ds(start, target.shape[-1])],
                    target.at[slot, place],
                    kv_barriers.at[slot],
                )

    def keys(slot):
        """K of a turn as wgmma takes it, [H, span]."""
        return (widened[0] if widened else k.at[slot]).transpose((1, 0))

    def columns_of(slot, start):
        """Some columns of V of a turn."""
        at = pl.ds(start, COLUMNS)
        return widened[1].at[:, at] if widened else v.at[slot, :, at]

    def widen(slot):
        for narrow, wide in zip((k, v), widened, strict=True):
            for start in range(0, wide.shape[-1], COLUMNS):
                at = pl.ds(start, COLUMNS)
                values = plgpu.layout_cast(narrow[slot, :, at], layout)
                wide[:, at] = values.astype(jnp.float32).astype(q.dtype)
        plgpu.commit_smem()

    def scrub(turn, slot):
        """Zeros where V holds nothing: 0 x NaN is NaN."""
        at = plgpu.broadcasted_iota(jnp.int32, (span, COLUMNS), 0, layout=layout) + turn * span
        for start in columns:
            place = columns_of(slot, start)
            values = plgpu.layout_cast(place[...], layout)
            place[...] = jnp.where((at < end) & (at >= low), values, jnp.zeros_like(values))
        plgpu.commit_smem()

    def score(turn, slot):
        def multiply(acc):
            plgpu.wgmma(acc, q, keys(slot))
            return acc[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((LINES, span), jnp.float32))
        scores = scores * (factors_ref[head, 0] * options.scale)
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores * (1 / options.soft_cap))
        line = plgpu.broadcasted_iota(jnp.int32, (LINES, span), 0, layout=layout)
        column = plgpu.broadcasted_iota(jnp.int32, (LINES, span), 1, layout=layout)
        ahead = column + turn * span - position
        if options.tile > 1:
            ahead = ahead - lax.rem(line, jnp.int32(options.tile))
        seen = (ahead <= 0) & (ahead > -window)
        return jnp.where(seen, scores, LOWEST), seen

    def weigh(weights, slot, start):
        def multiply(acc):
            left = weights_ref[0] if weights_ref else weights
            plgpu.wgmma(acc, left, columns_of(slot, start))
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((LINES, COLUMNS), jnp.float32))

    def turn_of(turn, carry):
        top, total, *sums = carry
        slot = lax.rem(turn - first, jnp.int32(2))

        @pl.when(turn + 1 < last)
        def _():
            plgpu.commit_smem()  # reads of the other slot come before the copy into it
            fetch(turn + 1, 1 - slot)

        plgpu.barrier_wait(kv_barriers.at[slot])
        if widened:
            widen(slot)
        pl.when(((turn + 1) * span > end) | (turn * span < low))(lambda: scrub(turn, slot))
        scores, seen = score(turn, slot)
        new = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp(scores - lax.broadcast_in_dim(new, scores.shape, [0]))
        weights = jnp.where(seen, weights, 0.0)
        keep = jnp.exp(top - new)
        total = total * keep + weights.sum(axis=1)
        weights = weights.astype(q.dtype)
        if weights_ref:
            weights_ref[0][...] = weights
            plgpu.commit_smem()
        sums = [
            old * lax.broadcast_in_dim(keep, old.shape, [0]) + weigh(weights, slot, start)
            for old, start in zip(sums, columns, strict=True)
        ]
        return new, total, *sums

    @pl.when(first < last)
    def _():
        plgpu.copy_gmem_to_smem(
            q_ref.at[_query(piece, q_ref, pieces_ref), head], q.at[part], q_barrier
        )
        fetch(first, jnp.int32(0))
        plgpu.barrier_wait(q_barrier)
        empty = [jnp.full((LINES, COLUMNS), 0.0, jnp.float32) for _ in columns]
        state = (
            plgpu.layout_cast(jnp.full((LINES,), LOWEST, jnp.float32), by_line),
            plgpu.layout_cast(jnp.full((LINES,), 0.0, jnp.float32), by_line),
            *(plgpu.layout_cast(values, layout) for values in empty),
        )
        top, total, *sums = lax.fori_loop(first, last, turn_of, state)
        for start, values in zip(columns, sums, strict=True):
            if not split:
                safe = jnp.where(total == 0.0, 1.0, total)
                values = values / lax.broadcast_in_dim(safe, values.shape, [0])
                values = values * factors_ref[head, 1]
            out[0][...] = values.astype(out[0].dtype)
            plgpu.commit_smem()
            target = outs[0].at[piece, head, :, pl.ds(first_column + start, COLUMNS)]
            plgpu.copy_smem_to_gmem(out[0].at[part], target)
            plgpu.wait_smem_to_gmem(0)
        if split:

            @pl.when(first_column == 0)
            def _():
                out[1][...], out[2][...] = top, total
                plgpu.commit_smem()
                for place, target in zip(out[1:], outs[1:], strict=True):
                    plgpu.copy_smem_to_gmem(place.at[part], target.at[piece, head])
                plgpu.wait_smem_to_gmem(0)


def _query(piece: Any, q_ref: Ref, pieces_ref: Ref) -> Any:
    """Index of the piece's queries: parts of a decode share those of their row."""
    if q_ref.shape[0] == pieces_ref.shape[0]:
        return piece
    return lax.div(piece, jnp.int32(pieces_ref.shape[0] // q_ref.shape[0]))
