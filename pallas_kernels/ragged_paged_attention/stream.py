"""The double-buffered walk over the context that the TPU kernels share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any
Action = Callable[[Any], None]  # on one copy: `start` or `wait`


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


class Source(NamedTuple):
    """Where a kernel's blocks come from, and where they go to."""

    kv: Ref  # [L, blocks, K, block_size, 2H] in HBM
    layer: Ref  # i32[1] in SMEM
    tables: Ref  # i32[B * P] in SMEM
    table_width: int  # P
    buffer: Ref  # [2, rows, K, blocks a turn, block_size, 2H] in VMEM
    semaphores: Ref  # [2]


def transfer(  # noqa: PLR0913  a source, and which blocks
    source: Source,
    action: Action,
    slot: jax.Array,
    line: int,  # row of the buffer
    row: jax.Array,  # row of the step
    turn: jax.Array,
    limits: tuple[jax.Array, jax.Array],  # positions of the row that are wanted: first, end
) -> None:
    """`action` on the copy of every block of one turn that holds a wanted position."""
    blocks, block_size = source.buffer.shape[3:5]
    low = jnp.maximum(turn * blocks, lax.div(limits[0], block_size))
    high = jnp.minimum((turn + 1) * blocks, pl.cdiv(limits[1], block_size))

    def one(index, carry):
        block = source.tables[row * source.table_width + index]
        place = source.buffer.at[slot, line, :, index - turn * blocks]
        action(
            pltpu.make_async_copy(
                source.kv.at[source.layer[0], block], place, source.semaphores.at[slot]
            )
        )
        return carry

    lax.fori_loop(low, high, one, 0)


def walk(  # noqa: PLR0913  a kernel's place in its grid, and what it does there
    count: jax.Array,  # i32[]  pieces of this call
    turns: tuple[Ref, Ref],  # i32[pieces] each: first turn, end
    parity: Ref,  # i32[1] in SMEM: the buffer of the next turn
    copy: Callable[[Action, jax.Array, jax.Array, jax.Array], None],  # those of piece, turn, slot
    compute: Callable[[jax.Array, jax.Array], None],  # turn, slot
) -> None:
    """Runs the turns of this grid step's piece; copies run one turn ahead, over its end as well.

    The grid is (cores, pieces a core); a core's pieces follow one another.
    """
    first_turns, end_turns = turns
    begin = pl.program_id(0) * pl.num_programs(1)
    end = jnp.minimum(begin + pl.num_programs(1), count)
    piece = begin + pl.program_id(1)

    @pl.when((pl.program_id(1) == 0) & (piece < end))
    def _():
        parity[0] = 0
        copy(start, piece, first_turns[piece], jnp.int32(0))

    @pl.when(piece < end)
    def _():
        first, last = first_turns[piece], end_turns[piece] - 1
        offset = parity[0]

        def one(turn, carry):
            slot = lax.rem(offset + turn - first, 2)
            next_piece = jnp.where(turn == last, piece + 1, piece)
            following = first_turns[jnp.minimum(next_piece, end - 1)]
            next_turn = jnp.where(turn == last, following, turn + 1)

            @pl.when(next_piece < end)
            def _():
                copy(start, next_piece, next_turn, 1 - slot)

            copy(wait, piece, turn, slot)
            compute(turn, slot)
            return carry

        lax.fori_loop(first, last + 1, one, 0)
        parity[0] = lax.rem(offset + last + 1 - first, 2)
