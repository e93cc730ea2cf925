"""Ragged paged attention for the TPU (Pallas Mosaic): packs of decode rows, tiles of chunks.

A grid step of the decode kernel holds a few rows; a turn copies some blocks of each, all kv heads
at once, and multiplies all heads of a row with the blocks of all kv heads in one matmul, whose
entries of other heads are masked: many rows in the matmul instead of one group.  A grid step of the
tile kernel holds one tile of queries, a matmul a kv head.  Copies run one turn ahead (`stream`).

Where H is no multiple of 128 lanes, queries are padded with zeros to 2H: q . [k | v] = q . k, and
of p . [k | v] the right half counts.  So nothing is ever sliced within a tile of lanes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import plan, tuning
from pallas_kernels.ragged_paged_attention.call import Call
from pallas_kernels.ragged_paged_attention.plan import Mask, Rows
from pallas_kernels.ragged_paged_attention.tpu_kernels import Options, decode_kernel, tile_kernel
from pallas_kernels.ragged_paged_attention.tuning import Problem, Sizes

LEAST_VMEM = 16 * tuning.MIB  # what a kernel may always have


def unsupported(q: Any, kv: Any, block_tables: Any) -> str | None:
    """Why these shapes cannot run here, or None."""
    problem = Problem.of(q, kv)
    if problem.head_dim % 64:
        return f"head_dim {problem.head_dim} is no multiple of 64: XLA would copy the whole KV"
    if kv.dtype.itemsize > 1 and kv.dtype != q.dtype:
        return f"{q.dtype} queries over {kv.dtype} KV"
    lines = 32 // kv.dtype.itemsize
    if problem.block_size % lines:
        return f"block_size {problem.block_size} is no multiple of {lines}, a tile of {kv.dtype}"
    sizes = tuning.tpu_sizes(problem, tuning.device_kind())
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
    call = Call.of(q, kv, layer, rows, mask, factors)
    out = _decode(call, sizes, interpret)
    per_row = plan.chunk_tiles(rows, sizes.tiles)
    starts = rows.query_starts[:-1]
    for size, tiles in zip(sizes.tiles, per_row, strict=True):
        run = functools.partial(_tiles, call, sizes, size, interpret)
        out = lax.cond(jnp.sum(tiles) > 0, run, lambda *operands: operands[-1], tiles, starts, out)
        starts = starts + tiles * size
    return out


def _options(call: Call) -> Options:
    mask, table_width = call.mask, call.rows.block_tables.shape[1]
    return Options(call.group, call.q.shape[2], mask.scale, mask.soft_cap, table_width)


def _decode(call: Call, sizes: Sizes, interpret: Any) -> jax.Array:
    """Attention of the rows of one query; zero for all other tokens."""
    num_tokens, heads, width = call.q.shape
    kv_heads, block_size = call.kv.shape[2:4]
    size, blocks = sizes.decode_rows, sizes.decode_blocks(block_size)
    packs = plan.decode_packs(call.rows, num_tokens, size, blocks * block_size, call.window)
    bound = len(packs.first_turns)
    problem = Problem.of(call.q, call.kv)
    lanes = problem.lanes
    padding = ((0, max(0, (bound + 1) * size - num_tokens)), (0, 0), (0, lanes - width))
    queries = jnp.pad(call.q, padding)[: (bound + 1) * size]
    factors = jnp.repeat(call.factors, call.group, axis=0)
    out = _call_kernel(
        functools.partial(decode_kernel, _options(call)),
        name="ragged_paged_attention_decode",
        count=packs.count,
        scalars=(*packs[1:], call.layer, call.rows.block_tables.reshape(-1)),
        inputs=(queries.reshape(bound + 1, size, heads, lanes), factors, call.kv),
        factors_space=pltpu.VMEM,
        scratch=_scratch((size, heads, lanes), (size, kv_heads, blocks, *call.kv.shape[3:]), call),
        vmem=tuning.decode_vmem(problem, sizes),
        cores=sizes.cores,
        interpret=interpret,
    )
    out = out.reshape(-1, heads, lanes)[:num_tokens, :, lanes - width :]
    out = jnp.pad(out, ((0, num_tokens - len(out)), (0, 0), (0, 0)))
    real = jnp.arange(num_tokens) < jnp.minimum(call.rows.num_decodes, len(call.rows.kv_lens))
    return jnp.where(real[:, None, None], out, 0)


def _tiles(  # noqa: PLR0913  a step's arrays, and how to run
    call: Call,
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
    problem, blocks = Problem.of(call.q, call.kv), sizes.tile_blocks(block_size)
    span = blocks * block_size
    tiles = plan.lay_tiles(call.rows, per_row, starts, num_tokens, size, span, call.window)
    bound, lanes, group = len(tiles.rows), problem.lanes, call.group
    where = jnp.pad(tiles.queries, (0, 1))[:, None] + jnp.arange(size)
    queries = call.q[jnp.minimum(where, num_tokens - 1)]
    queries = queries.reshape(bound + 1, size, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(bound + 1, kv_heads, group * size, width)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, lanes - width)))
    result = _call_kernel(
        functools.partial(tile_kernel, _options(call)),
        name="ragged_paged_attention_tiles",
        count=tiles.count,
        scalars=(
            *(tiles.rows, tiles.positions, tiles.ends, tiles.first_turns, tiles.end_turns),
            *(call.window.reshape(1), call.layer, call.rows.block_tables.reshape(-1)),
        ),
        inputs=(queries, call.factors, call.kv),
        factors_space=pltpu.SMEM,
        scratch=_scratch(
            (kv_heads, group * size, lanes), (1, kv_heads, blocks, *call.kv.shape[3:]), call
        ),
        vmem=tuning.tile_vmem(problem, sizes, size),
        cores=sizes.cores,
        interpret=interpret,
    )
    result = result[..., lanes - width :].reshape(bound + 1, kv_heads, group, size, width)
    result = result.transpose(0, 3, 1, 2, 4).reshape(-1, heads, width)
    inside = (tiles.places < bound * size)[:, None, None]
    return jnp.where(inside, result[tiles.places], out)


def _scratch(state: tuple[int, ...], turn: tuple[int, ...], call: Call) -> list[Any]:
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
    factors_space: Any,
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
    factors = pl.BlockSpec(memory_space=factors_space)
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
