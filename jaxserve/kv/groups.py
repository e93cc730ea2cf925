"""Groups of layers that see equally far, and how many blocks a request holds in each.

A block is the KV of `block_size` tokens in the layers of one group; all groups have equally many
layers, so that one pool serves them all.  A group with a window lets go the blocks that no later
step reads: those wholly before the window of the next token to compute.
"""

import functools
from collections.abc import Sequence

Windows = tuple[int | None, ...]
"""Of each group: positions that a query sees, itself included; None: all."""

FULL: Windows = (None,)


def blocks_seen(window: int | None, block_size: int) -> int | None:
    """Blocks before a block border that the token after it sees; at least one.  None: all."""
    return None if window is None else max(1, -(-(window - 1) // block_size))


def most_held(window: int | None, block_size: int, max_chunk: int) -> int | None:
    """Most blocks that a request holds at a time; `max_chunk`: most tokens it gets in a step.

    Before a chunk the group has the window, and what the step in flight computes: that can be found
    in the prefix cache only once it has returned, so it is not let go before.  None: no bound.
    """
    if window is None:
        return None
    return (max_chunk + max(window - 1, max_chunk) - 2) // block_size + 2


def row_blocks(windows: Windows, num_tokens: int, block_size: int, max_chunk: int) -> int:
    """Most blocks of all groups that a request of `num_tokens` tokens holds at a time."""
    most = [most_held(window, block_size, max_chunk) for window in windows]
    return _held(most, -(-num_tokens // block_size))


@functools.lru_cache(64)  # asked for every request
def longest_row(
    windows: Windows, num_blocks: int, block_size: int, max_chunk: int, max_len: int
) -> int:
    """Most tokens of KV, up to `max_len`, that one request can have in a pool of `num_blocks`."""
    most = [most_held(window, block_size, max_chunk) for window in windows]
    low, high = 0, -(-max_len // block_size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _held(most, middle) <= num_blocks else (low, middle - 1)
    return min(max_len, low * block_size)


def context_tokens(
    windows: Windows, num_blocks: int, block_size: int, max_chunk: int, max_len: int
) -> int:
    """Tokens of context that a pool of `num_blocks` holds in requests of `max_len` tokens."""
    if set(windows) == {None}:
        return num_blocks * block_size // len(windows)
    return num_blocks * max_len // row_blocks(windows, max_len, block_size, max_chunk)


def _held(most: Sequence[int | None], blocks: int) -> int:
    return sum(blocks if bound is None else min(bound, blocks) for bound in most)
