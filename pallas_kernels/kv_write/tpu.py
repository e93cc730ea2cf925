"""KV write for the TPU (Pallas Mosaic): read a slab of slots, put the new tokens in, write it back.

A slot is one line of a tile of 8 to 32 lines, which is the least that a copy can move, so the
kernel takes the tile of every kv head into VMEM.  Tokens are sorted by slot first: each slab is
read and written once, and copies of different slabs may overlap.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write.plan import slab_runs

Ref = Any
VMEM_LIMIT = 16 * 2**20


def slab_lines(kv: Any) -> int:
    """Slots that are read and written together: the lines of a tile."""
    return 32 // kv.dtype.itemsize


def unsupported(kv: Any) -> str | None:
    """Why a KV of this shape cannot be written here, or None."""
    kv_heads, block_size, width = kv.shape[2:]
    if width % 128:
        return f"a minor axis of {width} is no multiple of 128: XLA would copy the whole KV"
    lines = slab_lines(kv)
    if block_size % lines:
        return f"block_size {block_size} is no multiple of {lines}, a tile of {kv.dtype}"
    need = 8 * kv_heads * lines * width * 4  # two slabs each of before, new, after; and two in use
    if need > VMEM_LIMIT:
        return f"a slab of {lines} slots of {kv_heads} heads needs {need >> 20} MiB of VMEM"
    return None


def kv_write(  # noqa: PLR0913  a step's arrays, and how to run
    kv: jax.Array,  # [L, blocks, K, block_size, 2H]
    layer: jax.Array,  # i32[]
    slots: jax.Array,  # i32[T], >= S means padding; real slots are unique
    values: jax.Array,  # [T, K, 2H]
    *,
    interpret: Any = False,
) -> jax.Array:
    """See `api`."""
    kv_heads, block_size, width = kv.shape[2:]
    lines = slab_lines(kv)
    runs = slab_runs(slots, kv.shape[1] * block_size, lines)
    # In float32: lines of packed types cannot be moved one by one.
    values = jnp.pad(values[runs.order].astype(jnp.float32), ((0, lines), (0, 0), (0, 0)))
    slab = pltpu.VMEM((2, kv_heads, lines, width), kv.dtype)
    return pl.pallas_call(
        _kernel,
        name="kv_write",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(runs.count,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                slab,
                pltpu.VMEM((2, lines, kv_heads, width), jnp.float32),
                slab,
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
    )(jnp.asarray(layer, jnp.int32).reshape(1), runs.slots, runs.starts, values, kv)


def _kernel(  # noqa: PLR0913  refs in the order of the call
    layer: Ref,  # i32[1]
    slots: Ref,  # i32[T]
    starts: Ref,  # i32[T + 1]
    values: Ref,  # f32[T + lines, K, 2H]
    _: Ref,
    kv: Ref,
    before: Ref,  # [2, K, lines, 2H]
    new: Ref,  # f32[2, lines, K, 2H]
    after: Ref,
    semaphores: Ref,  # [2 directions, 2 buffers]
) -> None:
    kv_heads, lines, width = before.shape[1:]
    per_block = kv.shape[3] // lines
    run, count = pl.program_id(0), pl.num_programs(0)
    buffer = lax.rem(run, 2)

    def place(run):
        slab = lax.div(slots[starts[run]], lines)
        offset = pl.multiple_of(lax.rem(slab, per_block) * lines, lines)
        return kv.at[layer[0], lax.div(slab, per_block), :, pl.ds(offset, lines)]

    def reads(run, buffer):
        semaphore = semaphores.at[0, buffer]
        tokens = values.at[pl.ds(starts[run], lines)]
        return (
            pltpu.make_async_copy(place(run), before.at[buffer], semaphore),
            pltpu.make_async_copy(tokens, new.at[buffer], semaphore),
        )

    def write(run, buffer):
        return pltpu.make_async_copy(after.at[buffer], place(run), semaphores.at[1, buffer])

    @pl.when(run == 0)
    def _():
        for copy in reads(run, buffer):
            copy.start()

    @pl.when(run + 1 < count)
    def _():
        for copy in reads(run + 1, 1 - buffer):
            copy.start()

    @pl.when(run >= 2)
    def _():
        write(run - 2, buffer).wait()

    for copy in reads(run, buffer):
        copy.wait()
    line = lax.broadcasted_iota(jnp.int32, (kv_heads, lines, width), 1)
    first = starts[run]

    def put(index, slab):
        token = new[buffer, index].reshape(kv_heads, 1, width)
        return jnp.where(line == lax.rem(slots[first + index], lines), token, slab)

    slab = before[buffer].astype(jnp.float32)
    slab = lax.fori_loop(0, starts[run + 1] - first, put, slab)
    after[buffer] = slab.astype(after.dtype)
    write(run, buffer).start()

    @pl.when(run + 1 == count)
    def _():
        write(run, buffer).wait()
        pl.when(run >= 1)(lambda: write(run - 1, 1 - buffer).wait())
