"""Ownership of KV blocks: who uses which, and which idle block is given out next."""

import collections


class BlockPool:
    """Invariant: every block is blank (no content), idle (content, no user) or used (refs > 0)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack; the lowest block on top
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first
        self.num_allocated = 0  # blocks that got a first user, ever

    @property
    def num_free(self) -> int:
        """Blocks that can be given out: blank or idle."""
        return len(self._blank) + len(self._idle)

    def is_used(self, block: int) -> bool:
        return self._refs[block] > 0

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self) -> tuple[int, bool]:
        """A block for one user, and whether its old content must be forgotten now.

        Blank blocks go first, then the block that has been idle longest.  Needs `num_free > 0`.
        """
        evicts = not self._blank
        block = self._idle.popitem(last=False)[0] if evicts else self._blank.pop()
        self._refs[block] = 1
        self.num_allocated += 1
        return block, evicts

    def share(self, block: int) -> None:
        """One more user of a block that has content."""
        if not self._refs[block]:
            del self._idle[block]
            self.num_allocated += 1
        self._refs[block] += 1

    def give_back(self, block: int, has_content: bool) -> None:
        """One user less; the last one leaves it idle, or blank if nothing can be found in it."""
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if has_content:
            self._idle[block] = None
        else:
            self._blank.append(block)

    def blank_idle(self) -> None:
        """No idle block keeps its content."""
        self._blank.extend(self._idle)
        self._idle.clear()
