"""Which block holds which prefix: a chain of strong hashes over everything that changes KV.

A digest covers the parent's digest and the tokens of one full block; the root covers the identity
of the model and the request's salt.  SHA-256, so that nobody can construct a collision, and the
tokens are compared on a hit all the same.  Requests with equal salts can tell by timing that a
prefix was cached; different salts share nothing.

A prefix is found where every group of layers (`kv.groups`) can go on from it: a group that sees all
has all its blocks, a group with a window those that the next token sees.
"""

import hashlib
import struct
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class Hit(NamedTuple):
    """A cached prefix of whole blocks."""

    num_blocks: int
    blocks: Sequence[Sequence[int]]  # of each group, those it sees: the last of the prefix


class PrefixCache:
    """`sees`: of each group, how many blocks before it the next token sees; None: all.

    Invariant: the entries and `has(block)` name the same blocks.
    """

    def __init__(
        self, block_size: int, identity: str, sees: Sequence[int | None] = (None,)
    ) -> None:
        self._block_size = block_size
        self._pack = struct.Struct(f"{block_size}i").pack
        self._identity = hashlib.sha256(identity.encode()).digest()
        self._sees = sees
        # Of each group: digest -> block, its tokens.
        self._entries: list[dict[bytes, tuple[int, bytes]]] = [{} for _ in sees]
        self._digest: dict[int, tuple[int, bytes]] = {}  # block -> group, digest
        self.no_hit = Hit(0, [()] * len(sees))

    def __len__(self) -> int:
        return len(self._digest)

    def extend(
        self, digests: list[bytes], tokens: Sequence[int], num_blocks: int, salt: str
    ) -> None:
        """Appends to the chain `digests` of a request until it covers `num_blocks` blocks."""
        first = len(digests)
        if first < num_blocks:
            self._chain(digests, self._contents(tokens, first, num_blocks), salt)

    def find(
        self, digests: Sequence[bytes], tokens: Sequence[int], num_blocks: int, multiple: int = 1
    ) -> Hit:
        """The longest cached prefix of `tokens` of at most `num_blocks` blocks, a multiple of
        `multiple` of them."""
        if not num_blocks:
            return self.no_hit
        length = num_blocks
        for entries, sees in zip(self._entries, self._sees, strict=True):
            if sees is None:
                length = sum(1 for _ in takewhile(entries.__contains__, digests[:length]))
        length = self._seen_whole(digests, length - length % multiple, multiple)
        if not length:
            return self.no_hit
        starts = [0 if sees is None else max(0, length - sees) for sees in self._sees]
        first = min(starts)
        contents = self._contents(tokens, first, length)
        found: list[list[int]] = []
        for entries, start in zip(self._entries, starts, strict=True):
            known = [entries[digest] for digest in digests[start:length]]
            if [content for _, content in known] != contents[start - first :]:
                return self.no_hit
            found.append([block for block, _ in known])
        return Hit(length, found)

    def _seen_whole(self, digests: Sequence[bytes], length: int, multiple: int) -> int:
        """The longest prefix of at most `length` blocks of which the groups with a window have all
        that they see.  Looks at each block once."""
        groups = [
            (entries, sees)
            for entries, sees in zip(self._entries, self._sees, strict=True)
            if sees is not None
        ]
        widest = max((sees for _, sees in groups), default=0)
        index = length
        while index > max(0, length - widest):
            index -= 1
            digest = digests[index]
            if any(index >= length - sees and digest not in entries for entries, sees in groups):
                length = index - index % multiple
        return length

    def publish(
        self,
        digests: list[bytes],
        tokens: Sequence[int],
        first: int,
        blocks: Sequence[Sequence[int]],
        salt: str,
    ) -> None:
        """`blocks` of each group hold the full blocks of `tokens` from number `first`; of several
        blocks with one digest the first stays.  Extends the chain `digests` as far as needed."""
        known = len(digests)
        start = known if known < first else first
        contents = self._contents(tokens, start, first + len(blocks[0]))
        self._chain(digests, contents[known - start :], salt)
        for group, own in enumerate(blocks):
            entries = self._entries[group]
            for index, block in enumerate(own, first):
                digest = digests[index]
                if digest not in entries and block not in self._digest:
                    entries[digest] = (block, contents[index - start])
                    self._digest[block] = (group, digest)

    def has(self, block: int) -> bool:
        return block in self._digest

    def forget(self, block: int) -> None:
        group, digest = self._digest.pop(block)
        del self._entries[group][digest]

    def clear(self) -> None:
        for entries in self._entries:
            entries.clear()
        self._digest.clear()

    def _contents(self, tokens: Sequence[int], first: int, end: int) -> list[bytes]:
        """The tokens of blocks `first` to `end`, all of them full, as bytes."""
        size, pack = self._block_size, self._pack
        return [pack(*tokens[at : at + size]) for at in range(first * size, end * size, size)]

    def _chain(self, digests: list[bytes], contents: Sequence[bytes], salt: str) -> None:
        """Appends the digests of the blocks that follow the chain."""
        parent = digests[-1] if digests else self._root(salt)
        for content in contents:
            parent = hashlib.sha256(parent + content).digest()
            digests.append(parent)

    def _root(self, salt: str) -> bytes:
        return hashlib.sha256(self._identity + salt.encode("utf-8", "surrogatepass")).digest()
