"""What one step of a model consumes: plain arrays of one fixed shape, packed in one int32 buffer.

T tokens (bucket), B rows, P blocks per row, G groups of layers (`kv_layout`); with one group
there is no axis G.  No jax here: the host builds it, the step unpacks it.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

Array = Any  # numpy on the host, jax.Array inside the step


class StepInputs(NamedTuple):
    """One step's tokens, packed row after row; rows of one new token (decodes) come first.

    Padding is at the end of each axis.  Nothing negative: "nowhere" is an index past the end.
    """

    tokens: Array  # i32[T]  token ids; 0 for padding
    token_seats: Array  # i32[T]  seat whose last sampled token is meant; >= seats: see `tokens`
    positions: Array  # i32[T]  position in its request; 0 for padding
    slots: Array  # i32[G, T]  KV slot to write, block * block_size + offset; >= S for padding
    # i32[G, B, P]  blocks of each row; past its context any, before its window one that it sees
    block_tables: Array
    query_starts: Array  # i32[B + 1]  row b owns tokens query_starts[b]:query_starts[b + 1]
    kv_lens: Array  # i32[B]  tokens of the row in the cache after this step; 0 for padding
    num_decodes: Array  # i32[1]  the first num_decodes rows have exactly one query


def step_shapes(tokens: int, rows: int, blocks: int, groups: int = 1) -> StepInputs:
    """The shape of every field, for `tokens` T, `rows` B, `blocks` P and `groups` G."""
    per_token, per_row = (tokens,), (rows,)
    per_group = (groups,) if groups > 1 else ()
    return StepInputs(
        tokens=per_token,
        token_seats=per_token,
        positions=per_token,
        slots=(*per_group, tokens),
        block_tables=(*per_group, rows, blocks),
        query_starts=(rows + 1,),
        kv_lens=per_row,
        num_decodes=(1,),
    )


def packed_size(shapes: StepInputs) -> int:
    """Number of int32 values of the packed buffer."""
    return _places(shapes)[-1][1]


def unpack(packed: Array, shapes: StepInputs) -> StepInputs:
    """Views of `packed`, i32[packed_size(shapes)], one a field; for numpy and in a jitted step."""
    return StepInputs(
        *(
            packed[start:end].reshape(shape) if len(shape) > 1 else packed[start:end]
            for start, end, shape in _places(shapes)
        )
    )


@functools.lru_cache(maxsize=256)
def _places(shapes: StepInputs) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Of every field where it starts and ends in the buffer, and its shape."""
    ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
    return tuple(zip(ends[:-1], ends[1:], shapes, strict=True))
