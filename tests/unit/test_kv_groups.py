"""Laws of groups of layers in the KV manager: what is let go, what is found, what is promised."""

import random

import pytest

from jaxserve.kv.groups import blocks_seen, longest_row, most_held, row_blocks
from jaxserve.kv.manager import KVManager
from jaxserve.kv.prefix_cache import PrefixCache
from jaxserve.request import Request, SamplingParams, SeatProgress
from model_zoo.kv_layout import kv_layout

SEATS = 4
BIG = 400


def manager(
    windows: tuple, blocks: int, block_size: int, max_chunk: int, rows: int = BIG
) -> KVManager:
    return KVManager(
        num_blocks=blocks,
        block_size=block_size,
        seats=SEATS,
        blocks_per_row=-(-rows // block_size),
        prefix_caching=True,
        identity="m",
        windows=windows,
        max_chunk=max_chunk,
    )


class Row:
    """A request as the scheduler runs it: a chunk is planned while the one before is in flight."""

    def __init__(self, kv: KVManager, tokens: list[int], seat: int, reserve: int) -> None:
        self.kv, self.flight = kv, (0, 0)
        self.request = Request(seat, tokens, len(tokens), SamplingParams(), max_total=BIG)
        self.hit = kv.match(self.request)
        self.admitted = kv.try_admit(self.request, seat, self.hit, reserve_tokens=reserve, spare=0)
        if self.admitted:
            self.request.seats = SeatProgress(SEATS)
            self.end = self.hit.num_blocks * kv.block_size

    @property
    def end(self) -> int:
        return self.request.num_computed

    @end.setter
    def end(self, tokens: int) -> None:
        assert self.request.seats is not None
        self.request.seats.computed[self.request.seat] = tokens

    def step(self, num_tokens: int) -> bool:
        """Plans a chunk, then the chunk before it lands; False when there is no room."""
        start = self.end
        if not self.kv.try_grow(self.request, num_tokens):
            return False
        self.seen = [first * self.kv.block_size for first in self.kv._first[self.request.seat]]
        self.end = start + num_tokens
        self.land()
        self.flight = (start, start + num_tokens)
        return True

    def land(self) -> None:
        self.kv.landed(self.request, *self.flight)

    def leave(self) -> None:
        self.kv.release(self.request)
        self.request.seats = None


@pytest.mark.parametrize("window", [1, 2, 4, 5, 7, 8, 9, 13, 40])
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 50])
def test_a_window_holds_a_bounded_number_of_blocks_and_all_it_sees(
    window: int, block_size: int, chunk: int
) -> None:
    length = min(BIG, 2 * window + 4 * chunk + 3 * block_size)
    kv = manager((window, None), 2 * length // block_size + 4, block_size, chunk)
    row = Row(kv, list(range(length)), 0, length)
    most = most_held(window, block_size, chunk)
    assert most is not None
    while row.end < length:
        start = row.end
        assert row.step(min(chunk, length - start))
        kv.check([row.request])  # holds at most `most` of the window, among others
        assert row.seen[0] <= max(0, start - window + 1), "let go what the step reads"
        first = kv._first[0][0]
        table = kv.tables[0, 0]
        assert (table[:first] == table[first]).all(), "the table names a block that is gone"
    first = kv._first[0][0]
    landed = row.flight[0]  # nothing but the last step is on its way
    assert first >= min((length - window + 1) // block_size, landed // block_size) - 1
    assert kv._first[0][1] == 0
    row.leave()
    kv.check([])
    assert kv.num_used == 0 and kv.num_available == kv.num_blocks


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_hit_is_the_longest_that_every_group_can_go_on_from(seed: int) -> None:
    """Against the definition, with any blocks missing from any group."""
    rng = random.Random(seed)
    block_size, multiple = rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 3])
    windows = tuple(rng.choice([None, 1, 2, 3, 6, 11]) for _ in range(rng.randint(1, 4)))
    tokens = [rng.randrange(9) for _ in range(20 * block_size)]
    sees = [blocks_seen(window, block_size) for window in windows]
    cache = PrefixCache(block_size, "m", sees)
    digests: list[bytes] = []
    cache.publish(digests, tokens, 0, [range(20 * g, 20 * g + 20) for g in range(len(sees))], "")
    missing = rng.choice([0.02, 0.1, 0.5])
    present = [[rng.random() > missing for _ in range(20)] for _ in sees]
    for group, row in enumerate(present):
        for index, there in enumerate(row):
            if not there:
                cache.forget(20 * group + index)
    limit = rng.randint(0, 20)

    def fits(length: int) -> bool:
        """Every group has what a token at the end of `length` blocks sees."""
        return all(
            present[group][index]
            for group, window in enumerate(windows)
            for index in range(length)
            if window is None
            or (index + 1) * block_size > length * block_size - window + 1
            or index == length - 1  # for the table to name
        )

    expected = max(length for length in range(0, limit + 1, multiple) if fits(length))
    hit = cache.find(digests, tokens, limit, multiple)
    assert hit.num_blocks == expected
    for group, blocks in enumerate(hit.blocks):
        sees_here = sees[group]
        count = expected if sees_here is None else min(expected, sees_here)
        assert list(blocks) == [20 * group + i for i in range(expected - count, expected)]


def test_blocks_that_a_window_let_go_are_found_until_they_are_evicted() -> None:
    kv = manager((8, None), 40, 4, 4)
    row = Row(kv, list(range(41)), 0, 41)
    while row.end < 40:
        assert row.step(4)
    row.land()
    assert kv._first[0][0] == 8
    short = Row(kv, list(range(21)), 1, 21)  # its prefix ends where the window has passed long ago
    assert short.hit.num_blocks == 5 and short.admitted
    assert len(short.hit.blocks[0]) == 2 and len(short.hit.blocks[1]) == 5
    kv.check([row.request, short.request])
    assert short.step(1)
    short.leave()
    row.leave()
    kv.check([])


@pytest.mark.parametrize("seed", range(60))
def test_growth_within_a_promise_never_fails(seed: int) -> None:
    """Random admissions with shared prefixes, chunks and releases: the books agree."""
    rng = random.Random(seed)
    block_size, chunk = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 5, 16])
    windows = tuple(rng.choice([None, 1, 3, 6, 17]) for _ in range(rng.randint(1, 3)))
    kv = manager(windows, rng.randint(10, 80), block_size, chunk)
    prefixes = [[rng.randrange(9) for _ in range(60)] for _ in range(2)]
    rows: dict[int, Row] = {}
    refused = hits = 0
    for _ in range(300):
        seat = rng.randrange(SEATS)
        if seat not in rows:
            tokens = rng.choice(prefixes)[: rng.randint(1, 60)] + [rng.randrange(9)]
            row = Row(kv, tokens, seat, len(tokens) + rng.randint(0, 20))
            hits += row.hit.num_blocks > 0
            if row.admitted:
                rows[seat] = row
        elif rng.random() < 0.1 or rows[seat].end + chunk > BIG:
            rows.pop(seat).leave()
        else:
            row = rows[seat]
            more = rng.randint(1, chunk)
            row.request.tokens += [
                rng.randrange(9) for _ in range(row.end + more - len(row.request.tokens))
            ]
            within = kv.blocks_for(row.end + more) <= row.request.reserved
            grown = row.step(more)
            assert grown or not within, "a promise was broken"
            refused += not grown
            if not grown:
                rows.pop(seat).leave()
        kv.check([row.request for row in rows.values()])
    assert hits > 5
    for row in rows.values():
        row.leave()
    kv.check([])
    assert kv.num_available == kv.num_blocks


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_request_fits_alone_and_no_longer_one(seed: int) -> None:
    rng = random.Random(seed)
    block_size, chunk = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 5, 16])
    windows = tuple(rng.choice([None, 1, 3, 6, 17]) for _ in range(rng.randint(1, 3)))
    blocks = rng.randint(1, 60)
    longest = longest_row(windows, blocks, block_size, chunk, BIG)
    needs = [row_blocks(windows, tokens, block_size, chunk) for tokens in range(BIG + 1)]
    assert longest == max(n for n in range(BIG + 1) if needs[n] <= blocks)
    kv = manager(windows, blocks, block_size, chunk)
    if not longest:
        return
    row = Row(kv, list(range(longest)), 0, longest)
    assert row.admitted
    while row.end < longest:
        assert row.step(min(chunk, longest - row.end))
        kv.check([row.request])


GEMMA3_270M = [None if (layer + 1) % 6 == 0 else 512 for layer in range(18)]
MISTRAL_7B = [4096] * 32


@pytest.mark.parametrize(
    ("layers", "tokens", "held", "of_all"),
    [(GEMMA3_270M, 8_000, 1_005, 4_500), (MISTRAL_7B, 31_000, 4_128, 31_008)],
    ids=["gemma-3-270m at 8,000 tokens", "mistral-7b at 31,000 tokens"],
)
def test_what_windows_save(layers: list, tokens: int, held: int, of_all: int) -> None:
    """Blocks of one layer that a request holds while it decodes, against no groups."""
    block_size, chunk = 32, 512
    layout = kv_layout(len(layers), layers)
    blocks = -(-tokens // block_size)
    assert len(layers) * blocks == of_all
    kv = manager(layout.windows, layout.num_groups * (blocks + 1), block_size, chunk, rows=tokens)
    row = Row(kv, [0] * tokens, 0, tokens)
    while row.end < tokens - 96:
        assert row.step(min(chunk, tokens - 96 - row.end))
    while row.end < tokens:
        assert row.step(1)
    assert layout.depth * kv.num_used == held
