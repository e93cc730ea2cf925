"""Batches that every back end must compute as `reference` does."""

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch: each row as (queries, context length after the step), decodes first."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_decodes: int
    heads: tuple[int, int, int] = (4, 2, 16)  # N, K, H
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    pad_tokens: int = 3
    pad_rows: int = 2


class Inputs(NamedTuple):
    """Arrays of a case, float32: K and V block by block, NaN wherever nobody has written."""

    q: np.ndarray  # [T, N, H]
    k: np.ndarray  # [blocks, block_size, K, H]
    v: np.ndarray  # [blocks, block_size, K, H]
    block_tables: np.ndarray  # i32[B, P]
    query_starts: np.ndarray  # i32[B + 1]
    kv_lens: np.ndarray  # i32[B]
    num_decodes: np.ndarray  # i32[1]


class Shape(NamedTuple):
    """Sizes of the arrays; a case that needs less is padded up to them."""

    tokens: int = 0
    rows: int = 0
    table: int = 0  # blocks a row
    blocks: int = 0


_NO_PADDING = Shape()


def make_inputs(case: Case, *, seed: int = 0, at_least: Shape = _NO_PADDING) -> Inputs:
    """Random arrays of the case, with blocks in random order."""
    rng = np.random.default_rng(seed)
    heads, kv_heads, width = case.heads
    size = case.block_size
    used = [-(-length // size) for _, length in case.rows]
    num_rows = max(len(case.rows) + case.pad_rows, at_least.rows)
    blocks = max(sum(used) + 3, at_least.blocks)
    order = rng.permutation(blocks).astype(np.int32)
    # Past its context a row's table may hold anything.
    tables = rng.integers(0, blocks, (num_rows, max([*used, 1, at_least.table])), dtype=np.int32)
    k, v = np.full((2, blocks, size, kv_heads, width), np.nan, np.float32)
    for row, (_, length) in enumerate(case.rows):
        mine, order = order[: used[row]], order[used[row] :]
        tables[row, : used[row]] = mine
        for array in (k, v):
            for index, block in enumerate(mine):
                count = min(size, length - index * size)
                array[block, :count] = rng.standard_normal((count, kv_heads, width))
    counts = [count for count, _ in case.rows] + [0] * (num_rows - len(case.rows))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = max(starts[-1] + case.pad_tokens, at_least.tokens)
    q = rng.standard_normal((tokens, heads, width)).astype(np.float32)
    lens = np.zeros(num_rows, np.int32)
    lens[: len(case.rows)] = [length for _, length in case.rows]
    return Inputs(q, k, v, tables, starts, lens, np.array([case.num_decodes], np.int32))


def _decodes(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, length) for length in lengths)


_MIXED = (*_decodes(1, 7, 40, 300), (5, 5), (17, 17), (9, 45), (1, 33), (70, 330))
_WINDOW = 24

CASES = (
    Case("one decode", _decodes(19), 1, pad_tokens=7),
    Case("decodes", _decodes(1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 129), 11),
    Case("many decodes", _decodes(*range(1, 40)), 39),
    Case("a few decodes more", _decodes(*range(300, 280, -1)), 20),
    Case("half of a group more", _decodes(*range(10, 130, 5)), 24),
    Case("one chunk from zero", ((37, 37),), 0),
    Case("one chunk over a prefix", ((37, 300),), 0),
    Case("long chunk", ((300, 521),), 0),
    Case("chunks of half a tile", ((100, 100), (112, 700), (230, 259), (128, 385)), 0),
    Case("chunks of one query", ((1, 1), (1, 20), (2, 300)), 0),
    Case("chunks at block edges", ((15, 31), (16, 32), (17, 33), (16, 48)), 0),
    Case("many small chunks", tuple((n, n + 3 * n % 11) for n in range(1, 30)), 0),
    Case("mixed", _MIXED, 4),
    Case("mixed, no padding", _MIXED, 4, pad_tokens=0, pad_rows=0),
    Case("empty rows between", ((1, 9), (0, 0), (20, 25), (0, 40), (3, 3)), 1),
    Case("nothing", (), 0),
    Case("block of 1", _MIXED, 4, block_size=1),
    Case("block of 5", _MIXED, 4, block_size=5),
    Case("block of 32", _MIXED, 4, block_size=32),
    Case("block of 48", ((60, 700), (9, 699)), 0, block_size=48),  # no whole number a turn
    Case("block of 128", _MIXED, 4, block_size=128),
    Case("block of 512", _MIXED, 4, block_size=512),
    Case("heads 9, 3 of 64", _MIXED, 4, heads=(9, 3, 64)),
    Case("heads 8, 1 of 96", _MIXED, 4, heads=(8, 1, 96)),
    Case("heads 32, 8 of 128", ((1, 40), (6, 70)), 1, heads=(32, 8, 128)),
    Case("heads 4, 4 of 256", ((1, 40), (6, 70)), 1, heads=(4, 4, 256)),
    Case("soft cap", _MIXED, 4, soft_cap=2.0),
    Case("scale", _MIXED, 4, scale=0.7),
    Case("window of 1", _MIXED, 4, window=1),
    Case("window and soft cap", _MIXED, 4, window=_WINDOW, soft_cap=1.5),
    Case(
        "window edges, decodes",
        _decodes(_WINDOW - 1, _WINDOW, _WINDOW + 1, 2 * _WINDOW, 3 * _WINDOW + 5, 400),
        6,
        window=_WINDOW,
    ),
    *(
        Case(f"window edges, chunk to {length}", ((min(30, length), length),), 0, window=_WINDOW)
        for length in (_WINDOW - 1, _WINDOW, _WINDOW + 1, 2 * _WINDOW, 3 * _WINDOW + 5, 700)
    ),
)
