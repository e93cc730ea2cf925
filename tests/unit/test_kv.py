"""Laws of the block pool, the prefix cache and the promise of the KV manager."""

import random

import pytest

from jaxserve.kv.manager import KVManager
from jaxserve.kv.prefix_cache import PrefixCache
from jaxserve.request import Request, SamplingParams, SeatProgress

SEATS = 4


def manager(blocks: int = 12, block_size: int = 4, **more) -> KVManager:
    settings = {"prefix_caching": True, "identity": "m", **more}
    return KVManager(
        num_blocks=blocks, block_size=block_size, seats=SEATS, blocks_per_row=blocks, **settings
    )


def request(tokens: list[int], number: int = 0, salt: str = "") -> Request:
    made = Request(number, list(tokens), len(tokens), SamplingParams(), salt=salt)
    made.max_total = len(tokens) + 100
    return made


def admit(kv: KVManager, r: Request, seat: int, reserve: int | None = None, spare: int = 0) -> bool:
    hit = kv.match(r)
    reserve = len(r.tokens) if reserve is None else reserve
    if not kv.try_admit(r, seat, hit, reserve_tokens=reserve, spare=spare):
        return False
    r.seats = SeatProgress(SEATS)
    r.seats.computed[seat] = hit.num_blocks * kv.block_size
    return True


def compute(kv: KVManager, r: Request, end: int) -> bool:
    """Runs `r` up to `end` tokens and publishes; False when there is no room."""
    assert r.seats is not None
    start = r.num_computed
    if not kv.try_grow(r, end - start):
        return False
    r.seats.computed[r.seat] = end
    kv.landed(r, start, end)
    return True


def serve(kv: KVManager, tokens: list[int], salt: str = "", seat: int = 0) -> int:
    """Computes a whole prompt and lets it go; returns the tokens it found in the cache."""
    r = request(tokens, salt=salt)
    assert admit(kv, r, seat)
    hit = r.num_computed
    assert compute(kv, r, len(tokens))
    kv.release(r)
    r.seats = None
    return hit


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12, 13])
def test_b46_the_last_token_is_always_left_to_compute(length: int) -> None:
    kv = manager()
    tokens = list(range(length))
    assert serve(kv, tokens) == 0
    for _ in range(2):
        assert serve(kv, tokens) == (length - 1) // 4 * 4


def test_b49_b54_only_equal_identities_share() -> None:
    tokens = list(range(9))
    kv = manager()
    serve(kv, tokens, salt="a")
    assert serve(kv, tokens, salt="b") == 0
    assert serve(kv, tokens) == 0
    assert serve(kv, tokens, salt="a") == 8
    caches = [PrefixCache(4, identity) for identity in ("m|float32", "m|bfloat16")]
    chains = [[], []]
    for cache, chain in zip(caches, chains, strict=True):
        cache.extend(chain, tokens, 2, "")
    assert set(chains[0]).isdisjoint(chains[1])


def test_b53_hashes_come_from_absolute_positions() -> None:
    """Prompts that share only their second block share nothing."""
    kv = manager()
    serve(kv, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert serve(kv, [5, 6, 7, 8, 5, 6, 7, 8, 0]) == 0
    assert serve(kv, [9, 9, 9, 9, 5, 6, 7, 8, 0]) == 0
    assert serve(kv, [1, 2, 3, 4, 9, 9, 9, 9, 0]) == 4


def test_b54_tokens_are_compared_on_a_hit() -> None:
    """A colliding digest finds nothing when the tokens differ."""
    cache = PrefixCache(2, "m")
    chain: list[bytes] = []
    cache.publish(chain, [1, 2, 3], 0, [[7]], "")
    assert cache.find(chain, [1, 2, 3], 1) == (1, [[7]])
    assert cache.find(chain, [1, 9, 3], 1).num_blocks == 0


def test_b52_an_evicted_block_is_not_found_and_prefixes_outlive_suffixes() -> None:
    kv = manager(blocks=4)
    serve(kv, list(range(12)))  # blocks 0 1 2 cached, one blank
    other = request(list(range(100, 108)), 1)
    assert admit(kv, other, 0) and compute(kv, other, 8)  # takes the blank and evicts the tail
    tail = request(list(range(13)), 2)
    assert kv.match(tail).num_blocks == 2
    kv.release(other)


def test_oldest_idle_block_goes_first() -> None:
    kv = manager(blocks=4)
    first, second = [1, 1, 1, 1, 0], [2, 2, 2, 2, 0]
    serve(kv, first)
    serve(kv, second)
    assert serve(kv, first) == 4  # used again: now the younger
    big = request([3] * 12, 9)
    assert admit(kv, big, 1) and compute(kv, big, 12)
    assert kv.match(request(first, 10)).num_blocks == 1
    assert kv.match(request(second, 11)) == kv.no_hit


def test_nothing_is_found_before_it_is_published() -> None:
    kv = manager()
    r = request(list(range(9)))
    assert admit(kv, r, 0) and kv.try_grow(r, 9)
    assert kv.match(request(list(range(9)), 1)) == kv.no_hit
    kv.landed(r, 0, 9)
    assert kv.match(request(list(range(9)), 2)).blocks == kv.tables[:, 0, :2].tolist()


def test_hits_are_rounded_down_to_canonical_borders() -> None:
    kv = manager(hit_blocks=2)
    serve(kv, list(range(17)))
    for length, hit in ((13, 8), (8, 0), (9, 8), (17, 16)):
        assert kv.match(request(list(range(length)), 1)).num_blocks * 4 == hit


def test_forget_all() -> None:
    kv = manager()
    serve(kv, list(range(9)))
    kv.forget_all()
    kv.check([])
    assert serve(kv, list(range(9))) == 0


def test_b32_accounts_in_blocks() -> None:
    kv = manager(blocks=6, block_size=4)
    requests = [request([i] * 3, i) for i in range(3)]
    for seat, r in enumerate(requests):
        assert admit(kv, r, seat, reserve=4) and compute(kv, r, 3)
    assert kv.num_available == 3
    for r in requests:
        r.tokens += [9, 9]
        assert compute(kv, r, 5)  # one token over the border: a block each
    assert kv.num_available == 0
    kv.check(requests)


def test_try_or_change_nothing() -> None:
    kv = manager(blocks=3)
    r = request(list(range(8)))
    assert admit(kv, r, 0) and compute(kv, r, 8)
    state = (r.num_blocks, kv.num_available, kv.num_used)
    r.tokens += list(range(20))
    assert not kv.try_grow(r, 8)
    other = request(list(range(100, 109)), 1)
    assert not admit(kv, other, 1)
    assert not admit(kv, request(list(range(100, 103)), 2), 1, spare=1)
    assert (r.num_blocks, kv.num_available, kv.num_used) == state
    assert not other.num_blocks and other.seat == -1 and not other.reserved
    kv.check([r])


@pytest.mark.parametrize("seed", range(60))
def test_growth_within_a_promise_never_fails(seed: int) -> None:
    """Random admissions, growth and releases: the books agree, and a promise is always kept."""
    rng = random.Random(seed)
    kv = manager(blocks=rng.randint(4, 30), block_size=rng.choice([1, 2, 4, 8]))
    prefixes = [[rng.randrange(9) for _ in range(40)] for _ in range(2)]
    running: dict[int, Request] = {}
    for number in range(300):
        seat = rng.randrange(SEATS)
        if seat not in running:
            base = rng.choice(prefixes)[: rng.randint(1, 40)]
            r = request(base + [rng.randrange(9)], number)
            if admit(kv, r, seat, reserve=len(r.tokens) + rng.randint(0, 20)):
                running[seat] = r
        elif rng.random() < 0.25:
            kv.release(running.pop(seat))
        else:
            r = running[seat]
            more = rng.randint(1, 6)
            r.tokens += [rng.randrange(9) for _ in range(more)]
            end = min(len(r.tokens), r.num_computed + more)
            within = kv.blocks_for(end) <= max(r.reserved, r.num_blocks)
            if kv.blocks_for(end) <= kv.tables.shape[2]:
                grown = compute(kv, r, end)
                assert grown or not within, "a promise was broken"
        kv.check(list(running.values()))
    for r in running.values():
        kv.release(r)
        kv.release(r)  # harmless
    kv.check([])
    assert kv.num_available == kv.num_blocks
