"""Which block holds which prefix: a chain of strong hashes over everything that changes KV.

A digest covers the parent's digest and the tokens of one full block; the root covers the identity
of the model and the request's salt.  SHA-256, so that nobody can construct a collision, and the
tokens are compared on a hit all the same.  Requests with equal salts can tell by timing that a
prefix was cached; different salts share nothing.
"""

import array
import hashlib
from collections.abc import Sequence


class PrefixCache:
    """Invariant: `block_of(digest)` and `has(block)` name the same pairs."""

    def __init__(self, block_size: int, identity: str) -> None:
        self._block_size = block_size
        self._identity = hashlib.sha256(identity.encode()).digest()
        self._entries: dict[bytes, tuple[int, bytes]] = {}  # digest -> block, its tokens
        self._digest: dict[int, bytes] = {}  # block -> digest

    def __len__(self) -> int:
        return len(self._entries)

    def extend(
        self, digests: list[bytes], tokens: Sequence[int], num_blocks: int, salt: str
    ) -> None:
        """Appends to the chain `digests` of a request until it covers `num_blocks` blocks."""
        first = len(digests)
        if first < num_blocks:
            self._chain(digests, _blocks(tokens, first, num_blocks, self._block_size), salt)

    def find(self, digests: Sequence[bytes], tokens: Sequence[int], num_blocks: int) -> list[int]:
        """Blocks that hold the longest cached prefix of `tokens`, at most `num_blocks` of them."""
        found: list[int] = []
        if not num_blocks or digests[0] not in self._entries:
            return found
        contents = _blocks(tokens, 0, num_blocks, self._block_size)
        for digest, content in zip(digests[:num_blocks], contents, strict=True):
            block, known = self._entries.get(digest, (-1, b""))
            if known != content:
                break
            found.append(block)
        return found

    def publish(
        self,
        digests: list[bytes],
        tokens: Sequence[int],
        first: int,
        blocks: Sequence[int],
        salt: str,
    ) -> None:
        """`blocks` hold the full blocks of `tokens` from number `first`; of several blocks with one
        digest the first stays.  Extends the chain `digests` as far as needed."""
        self.extend(digests, tokens, first, salt)
        contents = _blocks(tokens, first, first + len(blocks), self._block_size)
        self._chain(digests, contents[len(digests) - first :], salt)
        for digest, block, content in zip(digests[first:], blocks, contents, strict=False):
            if digest not in self._entries and block not in self._digest:
                self._entries[digest] = (block, content)
                self._digest[block] = digest

    def has(self, block: int) -> bool:
        return block in self._digest

    def forget(self, block: int) -> None:
        del self._entries[self._digest.pop(block)]

    def clear(self) -> None:
        self._entries.clear()
        self._digest.clear()

    def _chain(self, digests: list[bytes], contents: Sequence[bytes], salt: str) -> None:
        """Appends the digests of the blocks that follow the chain."""
        parent = digests[-1] if digests else self._root(salt)
        for content in contents:
            parent = hashlib.sha256(parent + content).digest()
            digests.append(parent)

    def _root(self, salt: str) -> bytes:
        return hashlib.sha256(self._identity + salt.encode("utf-8", "surrogatepass")).digest()


def _blocks(tokens: Sequence[int], first: int, end: int, block_size: int) -> list[bytes]:
    """The tokens of blocks `first` to `end`, as bytes."""
    raw = array.array("i", tokens[first * block_size : end * block_size]).tobytes()
    size = 4 * block_size
    if len(raw) == size:
        return [raw]
    return [raw[at : at + size] for at in range(0, len(raw), size)]
