"""KV blocks of requests: prefix hits, growth, and the promise that stops thrash.

**Promise.** Admission promises a request `reserved` blocks.  The pool always has at least as many
free blocks as are promised and not yet taken, so growth within a promise never fails and never
costs anybody else a block.  Growth beyond it may fail; then some running request holds more than
its promise (at least the one that grows), and only such a request may be preempted.
"""

from collections.abc import Collection, Sequence

import numpy as np

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.prefix_cache import PrefixCache
from jaxserve.request import Request


class KVManager:
    """All counts are blocks unless a name says tokens.

    `hit_blocks`: prefix hits are rounded down to a multiple of this many blocks.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        seats: int,
        blocks_per_row: int,
        prefix_caching: bool,
        identity: str,
        hit_blocks: int = 1,
    ) -> None:
        self.block_size = block_size
        self.tables = np.zeros((seats, blocks_per_row), np.int32)  # [seats, P], by seat
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(block_size, identity)
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

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[int]:
        """Blocks that already hold a prefix of `request`; at least one token is left to compute."""
        if not self._prefix_caching:
            return []
        limit = (len(request.tokens) - 1) // self.block_size
        self._cache.extend(request.digests, request.tokens, limit, request.salt)
        found = self._cache.find(request.digests, request.tokens, limit)
        return found[: len(found) // self._hit_blocks * self._hit_blocks]

    def try_admit(
        self, request: Request, seat: int, hit: Sequence[int], *, reserve_tokens: int, spare: int
    ) -> bool:
        """Pins `hit`, a fresh result of `match`, and promises blocks for `reserve_tokens` tokens in
        all; leaves at least `spare` blocks that are promised to nobody.  Or changes nothing."""
        reserved = max(self.blocks_for(reserve_tokens), len(hit))
        idle = sum(not self._pool.is_used(block) for block in hit)
        if reserved - len(hit) + idle + spare > self.num_available:
            return False
        for block in hit:
            self._pool.share(block)
        self._promised += reserved - len(hit)
        self.tables[seat, : len(hit)] = hit
        request.seat, request.reserved = seat, reserved
        request.blocks.extend(hit)
        return True

    def try_grow(self, request: Request, num_tokens: int) -> bool:
        """Makes room for `num_tokens` more tokens of `request`, or changes nothing."""
        have = len(request.blocks)
        need = self.blocks_for(request.num_computed + num_tokens) - have
        if need <= 0:
            return True
        within = min(need, max(0, request.reserved - have))
        if need - within > self.num_available:
            return False
        self._promised -= within
        for index in range(have, have + need):
            block, evicts = self._pool.take()
            if evicts:
                self._cache.forget(block)
            request.blocks.append(block)
            self.tables[request.seat, index] = block
        return True

    def publish(self, request: Request, start: int, end: int) -> None:
        """The step that computed tokens `start` to `end` has returned: full blocks can be found."""
        first, last = start // self.block_size, end // self.block_size
        if first == last or not self._prefix_caching:
            return
        self._cache.publish(
            request.digests, request.tokens, first, request.blocks[first:last], request.salt
        )

    def release(self, request: Request) -> None:
        """Takes all blocks and the promise from `request`; harmless when it has none."""
        self._promised -= max(0, request.reserved - len(request.blocks))
        for block in reversed(request.blocks):  # tail first, so that a prefix outlives its suffixes
            self._pool.give_back(block, self._cache.has(block))
        request.blocks.clear()
        request.reserved = 0

    def forget_all(self) -> None:
        """Nothing cached can be found any more; for use when no request holds a block."""
        self._pool.blank_idle()
        self._cache.clear()

    def check(self, running: Collection[Request]) -> None:
        """Raises AssertionError unless the books agree with `running`; for tests, O(blocks)."""
        counts = [0] * self.num_blocks
        for request in running:
            for index, block in enumerate(request.blocks):
                counts[block] += 1
                assert self.tables[request.seat, index] == block, (request.number, index)
        for block, count in enumerate(counts):
            assert self._pool.refs(block) == count, (block, count)
        promised = sum(max(0, r.reserved - len(r.blocks)) for r in running)
        assert promised == self._promised <= self._pool.num_free, (promised, self._promised)
        assert self._pool.num_free == counts.count(0)
