"""How much of a prompt another request had computed already, and why it was not found."""

import collections

from jaxserve.config import EngineConfig
from jaxserve.request import Request

_REMEMBERED = 1 << 17  # blocks


class Prefixes:
    """Remembers which blocks of prompts were computed when, by the digests of the prefix cache."""

    def __init__(self, config: EngineConfig) -> None:
        self._block_size = config.cache.block_size
        # A step was planned without knowing the results of this many steps before it.
        self._behind = 1 + config.runner.overlap
        rules = config.scheduler
        deterministic = config.runner.deterministic
        self._hit_blocks = rules.chunk_size // self._block_size if deterministic else 1
        # Digest -> step that computed it; None: a request that has it was admitted.
        self._steps: collections.OrderedDict[bytes, int | None] = collections.OrderedDict()

    def admitted(self, request: Request, step: int) -> tuple[int, int, int]:
        """Tokens of the prefix that `request` shares with earlier ones and still computes: others
        compute them at the same time, they were evicted, the hit was rounded down."""
        limit = (request.num_prompt - 1) // self._block_size
        shared = found = 0
        for digest in request.digests[:limit]:
            if digest not in self._steps:
                break
            computed = self._steps[digest]
            shared += 1
            found += (
                found == shared - 1 and computed is not None and computed <= step - self._behind
            )
        for digest in request.digests[:limit]:
            self._steps.setdefault(digest, None)
        while len(self._steps) > _REMEMBERED:
            self._steps.popitem(last=False)
        cached = request.num_cached // self._block_size
        usable = shared - shared % self._hit_blocks
        found = min(found, usable) - min(found, usable) % self._hit_blocks
        parts = (usable - max(found, cached), found - cached, shared - usable)
        same_time, evicted, rounded = (max(0, part) * self._block_size for part in parts)
        return same_time, evicted, rounded

    def computed(self, request: Request, start: int, end: int, step: int) -> None:
        """A chunk of `request` is done."""
        size = self._block_size
        for digest in request.digests[start // size : end // size]:
            if self._steps.get(digest) is None:
                self._steps[digest] = step
