"""How a step's rows are cut into the pieces that a kernel works on: plain jax, no back end.

A piece is a tile (consecutive queries of one row) or a pack (rows of one query each).  A kernel
walks the context of a piece in turns of `span` positions; turns start at multiples of the span,
so the order in which a query sums up its context depends neither on how its prompt was cut nor on
its neighbours.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_WINDOW = 2**30  # longer than any context


class Rows(NamedTuple):
    """Where the queries and the context of each row lie."""

    block_tables: jax.Array  # i32[B, P]
    query_starts: jax.Array  # i32[B + 1]
    kv_lens: jax.Array  # i32[B]
    num_decodes: jax.Array  # i32[]


class Mask(NamedTuple):
    """Which positions a query sees, and how scores are shaped."""

    window: int | jax.Array | None
    soft_cap: float | None
    scale: float | jax.Array  # an array broadcasts to scores of [..., K, queries, positions]


class Packs(NamedTuple):
    """Decode rows, `size` at a time."""

    count: jax.Array  # i32[]  packs that hold a row
    lens: jax.Array  # i32[packs * size]  context of each row, 0 for none
    lows: jax.Array  # i32[packs * size]  first position it sees
    first_turns: jax.Array  # i32[packs]
    end_turns: jax.Array  # i32[packs]


class Tiles(NamedTuple):
    """Queries of one row each, up to `size` of them."""

    count: jax.Array  # i32[]  tiles that hold a query
    rows: jax.Array  # i32[tiles]
    queries: jax.Array  # i32[tiles]  index in T of the first query
    positions: jax.Array  # i32[tiles]  its position in the row
    ends: jax.Array  # i32[tiles]  positions the last query sees, itself included
    first_turns: jax.Array  # i32[tiles]
    end_turns: jax.Array  # i32[tiles]
    places: jax.Array  # i32[T]  tile * size + offset of each query; tiles * size if in no tile


class Pieces(NamedTuple):
    """Pieces of any kind, as columns of one array."""

    rows: jax.Array  # i32[pieces]
    positions: jax.Array  # i32[pieces]  of the first query
    ends: jax.Array  # i32[pieces]  positions that any of its queries sees: lows..ends
    lows: jax.Array  # i32[pieces]
    first_turns: jax.Array  # i32[pieces]
    end_turns: jax.Array  # i32[pieces]  first_turns if there is nothing to do
    windows: jax.Array  # i32[pieces]


def decode_parts(
    rows: Rows, bound: int, limits: tuple[int, int], span: int, window: jax.Array
) -> Pieces:
    """The context of each of the first num_decodes of `bound` rows, in equal parts.

    `limits`: most parts a row, and turns that a part has unless that makes more.  The parts depend
    on the row's own length alone, and so do the bits of the result.
    """
    most, turns = limits
    lens = jnp.where(jnp.arange(bound) < rows.num_decodes, rows.kv_lens[:bound], 0)
    lows = jnp.maximum(lens - window, 0)
    begin, end = lows // span, -(-lens // span)
    parts = jnp.clip(-(-(end - begin) // turns), 1, most)
    each = -(-(end - begin) // parts)
    first = begin[:, None] + jnp.arange(most) * each[:, None]
    last = jnp.maximum(first, jnp.minimum(first + each[:, None], end[:, None]))
    row, position, ends, low = (
        jnp.repeat(values, most) for values in (jnp.arange(bound), lens - 1, lens, lows)
    )
    windows = jnp.broadcast_to(window, bound * most)
    return Pieces(row, position, ends, low, first.reshape(-1), last.reshape(-1), windows)


def decode_packs(rows: Rows, num_tokens: int, size: int, span: int, window: jax.Array) -> Packs:
    """The first num_decodes rows, `size` a pack."""
    bound = min(len(rows.kv_lens), num_tokens)
    lens = jnp.where(jnp.arange(bound) < rows.num_decodes, rows.kv_lens[:bound], 0)
    lens = jnp.pad(lens, (0, -bound % size))
    lows = jnp.maximum(lens - window, 0)
    first = jnp.where(lens > 0, lows // span, NO_WINDOW).reshape(-1, size).min(axis=1)
    end = (-(-lens // span)).reshape(-1, size).max(axis=1)
    count = -(-jnp.minimum(rows.num_decodes, bound) // size)
    return Packs(count, lens, lows, jnp.minimum(first, end), end)


def num_tiles(num_tokens: int, num_rows: int, size: int) -> int:
    """Most tiles that any step of these sizes has."""
    return num_tokens // size + min(num_rows, num_tokens)


def chunk_tiles(rows: Rows, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Tiles of each size, largest first, that each row is cut into: i32[B] a size.

    A row takes as many large tiles as it fills (three quarters full is full: one large tile costs
    less than several small ones), and the smallest size for what is left.
    """
    counts = rows.query_starts[1:] - rows.query_starts[:-1]
    left = jnp.where(jnp.arange(len(counts)) < rows.num_decodes, 0, counts)
    cut = []
    for size in sizes[:-1]:
        tiles = (left + size // 4) // size
        cut.append(tiles)
        left = jnp.maximum(left - tiles * size, 0)
    return [*cut, -(-left // sizes[-1])]


def lay_tiles(  # noqa: PLR0913  a step's rows, and the sizes of its tiles
    rows: Rows,
    per_row: jax.Array,  # i32[B]  tiles of this size
    starts: jax.Array,  # i32[B]  index in T where they begin
    num_tokens: int,
    size: int,
    span: int,
    window: jax.Array,  # i32[]
) -> Tiles:
    """Where each tile of one size lies."""
    ends_of = rows.query_starts[1:]
    tiles = num_tiles(num_tokens, len(per_row), size)
    last = jnp.cumsum(per_row)
    index = jnp.arange(tiles)
    row = jnp.minimum(jnp.sum(last[None, :] <= index[:, None], axis=1), len(per_row) - 1)
    nth = index - last[row] + per_row[row]
    real = index < last[-1]
    query = jnp.where(real, starts[row] + nth * size, 0)
    position = jnp.where(real, rows.kv_lens[row] - ends_of[row] + query, 0)
    end = jnp.where(real, jnp.minimum(position + size, rows.kv_lens[row]), 0)
    low = jnp.maximum(position + 1 - window, 0)
    token = jnp.arange(num_tokens)
    owner = jnp.minimum(jnp.sum(ends_of[None, :] <= token[:, None], axis=1), len(per_row) - 1)
    offset = token - starts[owner]
    inside = (token < ends_of[owner]) & (offset >= 0) & (offset < per_row[owner] * size)
    place = (last[owner] - per_row[owner]) * size + offset
    return Tiles(
        count=last[-1],
        rows=row,
        queries=query,
        positions=position,
        ends=end,
        first_turns=low // span,
        end_turns=-(-end // span),
        places=jnp.where(inside, place, tiles * size),
    )
