"""KV blocks of requests: prefix hits, growth, release, and the promise that stops thrash.

**Groups.**  Every group of layers (`kv.groups`) has its own block table of a request.  A group with
a window lets go the blocks before it, as soon as the step that wrote them has returned: only then
can the prefix cache find them.  Steps that still read them were dispatched before any step that
could write to them anew, and a device runs steps in order.

**Promise.**  Admission promises a request blocks for `reserved` blocks of tokens.  The pool always
has at least as many free blocks as are promised and not yet taken, so growth within a promise never
fails and never costs anybody else a block.  Growth beyond it may fail; then some running request
holds more than its promise (at least the one that grows), and only such a request may be preempted.
A group with a window holds a bounded number of blocks, and takes as many as it lets go.  What it
lets go is free only if no other request holds it too: so each further holder of such a block counts
as a promised block.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.groups import FULL, Windows, blocks_seen, most_held
from jaxserve.kv.prefix_cache import Hit, PrefixCache
from jaxserve.request import Request

_UNBOUNDED = 2**31


class _Group(NamedTuple):
    """Window in tokens, and most blocks that a request holds; both _UNBOUNDED where it sees all."""

    window: int
    most: int


class KVManager:
    """All counts are blocks unless a name says tokens.

    `windows`: of each group of layers.  `max_chunk`: most tokens a request gets in a step.
    `hit_blocks`: prefix hits are rounded down to a multiple of this many blocks.
    """

    def __init__(  # noqa: PLR0913  sizes of the pool, and the rules
        self,
        *,
        num_blocks: int,
        block_size: int,
        seats: int,
        blocks_per_row: int,
        prefix_caching: bool,
        identity: str,
        hit_blocks: int = 1,
        windows: Windows = FULL,
        max_chunk: int = 1,
    ) -> None:
        self.block_size, self.windows = block_size, windows
        # i32[groups, seats, P].  Places before the window of a row name a block that it sees.
        self.tables = np.zeros((len(windows), seats, blocks_per_row), np.int32)
        self._of_group = list(self.tables)  # views: faster than making one a use
        self._groups = [
            _Group(window or _UNBOUNDED, most_held(window, block_size, max_chunk) or _UNBOUNDED)
            for window in windows
        ]
        self._windowed = [index for index, window in enumerate(windows) if window is not None]
        self._first = [[0] * len(windows) for _ in range(seats)]  # block that each group still has
        self._landed = [0] * seats  # blocks whose steps have returned
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(
            block_size, identity, [blocks_seen(window, block_size) for window in windows]
        )
        self._prefix_caching = prefix_caching
        self._hit_blocks = hit_blocks
        self._promised = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        return self._pool.num_blocks - self._pool.num_free

    @property
    def num_allocated(self) -> int:
        """Blocks that came into use since the start; less `num_used`, those that were freed."""
        return self._pool.num_allocated

    @property
    def num_available(self) -> int:
        """Free blocks that are promised to nobody."""
        return self._pool.num_free - self._promised

    @property
    def no_hit(self) -> Hit:
        return self._cache.no_hit

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group."""
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> Hit:
        """Blocks that already hold a prefix of `request`; at least one token is left to compute."""
        if not self._prefix_caching:
            return self.no_hit
        limit = (len(request.tokens) - 1) // self.block_size
        self._cache.extend(request.digests, request.tokens, limit, request.salt)
        return self._cache.find(request.digests, request.tokens, limit, self._hit_blocks)

    def try_admit(
        self, request: Request, seat: int, hit: Hit, *, reserve_tokens: int, spare: int
    ) -> bool:
        """Pins `hit`, a fresh result of `match`, and promises blocks for `reserve_tokens` tokens in
        all; leaves at least `spare` blocks that are promised to nobody.  Or changes nothing."""
        length = hit.num_blocks
        reserved = max(self.blocks_for(reserve_tokens), length)
        promised = taken = 0
        for group, blocks in zip(self._groups, hit.blocks, strict=True):
            promised += min(group.most - len(blocks), reserved - length)
            used = sum(map(self._pool.is_used, blocks))
            taken += len(blocks) - used
            if group.window != _UNBOUNDED:
                promised += used
        if promised + taken + spare > self.num_available:
            return False
        self._promised += promised
        for index, blocks in enumerate(hit.blocks):
            for block in blocks:
                self._pool.share(block)
            first = length - len(blocks)
            self._first[seat][index] = first
            self.tables[index, seat, first:length] = blocks
            self.tables[index, seat, :first] = self.tables[index, seat, first]
        self._landed[seat] = length
        request.seat, request.reserved, request.num_blocks = seat, reserved, length
        return True

    def try_grow(self, request: Request, num_tokens: int) -> bool:
        """Makes room for `num_tokens` more tokens of `request`; False: there is none, and nothing
        has changed but that blocks which nothing reads any more were let go."""
        have = request.num_blocks
        end = self.blocks_for(request.num_computed + num_tokens)
        if end <= have:
            return True
        if self._windowed:
            self._let_go(request)
        left = self._left(request, end)
        within = self._left(request, have) - left
        if (end - have) * len(self._groups) - within > self.num_available:
            return False
        self._promised -= within
        for index in range(have, end):
            for table in self._of_group:
                block, evicts = self._pool.take()
                if evicts:
                    self._cache.forget(block)
                table[request.seat, index] = block
        request.num_blocks = end
        return True

    def landed(self, request: Request, start: int, end: int, *, publish: bool = True) -> None:
        """The step that computed tokens `start` to `end` has returned: full blocks can be found
        (with `publish`), and go where no later step reads them."""
        first, last = start // self.block_size, end // self.block_size
        if first == last:
            return
        if publish and self._prefix_caching:
            seat = request.seat
            blocks = [table[seat, first:last].tolist() for table in self._of_group]
            self._cache.publish(request.digests, request.tokens, first, blocks, request.salt)
        if self._windowed:
            self._landed[request.seat] = last
            self._let_go(request)

    def release(self, request: Request) -> None:
        """Takes all blocks and the promise from `request`; harmless when it has none."""
        if request.reserved:
            self._promised -= self._left(request, request.num_blocks)
            held = self.tables[:, request.seat, : request.num_blocks].T.tolist()
            firsts = self._first[request.seat]
            for index in range(request.num_blocks - 1, -1, -1):
                # Tail first, so that a prefix outlives its suffixes.
                for group, block in enumerate(held[index]):
                    if index >= firsts[group]:
                        self._give_back(group, block)
            self._first[request.seat] = [0] * len(firsts)
        request.num_blocks = request.reserved = 0

    def forget_all(self) -> None:
        """Nothing cached can be found any more; for use when no request holds a block."""
        self._pool.blank_idle()
        self._cache.clear()

    def check(self, running: Collection[Request]) -> None:
        """Raises AssertionError unless the books agree with `running`; for tests, O(blocks)."""
        counts = [0] * self.num_blocks
        promised = sum(self._left(r, r.num_blocks) for r in running)
        for index, group in enumerate(self._groups):
            held = [0] * self.num_blocks
            for request in running:
                first, row = self._first[request.seat][index], self.tables[index, request.seat]
                assert 0 <= first <= max(0, request.num_blocks - 1), (request.number, first)
                assert request.num_blocks - first <= group.most, (request.number, first)
                assert (row[:first] == row[first]).all(), (request.number, row)
                for block in row[first : request.num_blocks].tolist():
                    held[block] += 1
            if group.window != _UNBOUNDED:
                promised += sum(count - 1 for count in held if count)
            counts = [count + more for count, more in zip(counts, held, strict=True)]
            assert all(not more or more == all_ for more, all_ in zip(held, counts, strict=True)), (
                "a block is in two groups"
            )
        for block, count in enumerate(counts):
            assert self._pool.refs(block) == count, (block, count)
        assert promised == self._promised <= self._pool.num_free, (promised, self._promised)
        assert self._pool.num_free == counts.count(0)

    def _left(self, request: Request, blocks: int) -> int:
        """What is left of the promise when the request has `blocks` blocks of tokens."""
        more = request.reserved - blocks
        if more <= 0:
            return 0
        if not self._windowed:
            return more * len(self._groups)
        firsts = self._first[request.seat]
        return sum(
            max(0, min(group.most - blocks + first, more))
            for group, first in zip(self._groups, firsts, strict=True)
        )

    def _let_go(self, request: Request) -> None:
        """Gives back what is before every window of the next token to compute and has landed; the
        last block stays, for the table to name."""
        seat, computed = request.seat, request.num_computed
        most = min(self._landed[seat], request.num_blocks - 1)
        firsts = self._first[seat]
        before = self._left(request, request.num_blocks)
        for index in self._windowed:
            first = firsts[index]
            end = min(most, (computed - self._groups[index].window + 1) // self.block_size)
            if end <= first:
                continue
            row = self.tables[index, seat]
            for block in row[first:end].tolist():  # the oldest first, so that it goes first
                self._give_back(index, block)
            row[:end] = row[end]
            firsts[index] = end
        self._promised += self._left(request, request.num_blocks) - before

    def _give_back(self, group: int, block: int) -> None:
        if self._groups[group].window != _UNBOUNDED and self._pool.refs(block) > 1:
            self._promised -= 1
        self._pool.give_back(block, self._cache.has(block))
