"""What a position sees, as one number: a hash of its token and of all KV in the windows of its
groups of layers."""

import collections
from collections.abc import Iterable

import numpy as np

from jaxserve.kv.groups import FULL, Windows

MASK = 2**64 - 1


def mix(a: int, b: int) -> int:
    """A strong-enough hash of two numbers (SplitMix64 finaliser)."""
    z = (a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mix_array(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`mix` for u64 arrays."""
    z = (
        a * np.uint64(0x9E3779B97F4A7C15)
        + b * np.uint64(0xD1B54A32D192ED03)
        + np.uint64(0x632BE59BD9B4E019)
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Context:
    """What one request has computed so far, as its next token sees it in each group.

    The KV of a token in a group is a hash of the token, the group and all that the token sees.
    """

    def __init__(self, windows: Windows = FULL) -> None:
        self._windows = windows
        self._sums = [0] * len(windows)  # of the hashes of all KV that is seen
        self._seen = [collections.deque[int]() for _ in windows]  # where a window forgets them

    def read(self, group: int, hashes: Iterable[int]) -> None:
        """Of the KV that a group sees before the first token to compute: mix(kv, position)."""
        for one in hashes:
            self._add(group, one)

    def advance(self, token: int, position: int) -> list[int]:
        """The KV of the next token in each group."""
        for group, window in enumerate(self._windows):
            if window is not None and len(self._seen[group]) >= window:
                self._sums[group] -= self._seen[group].popleft()
        before = self.value
        kv = [
            mix(before, token * 1_000_003 + position + group * 15_485_863)
            for group in range(len(self._windows))
        ]
        for group, one in enumerate(kv):
            self._add(group, mix(one, position))
        return kv

    @property
    def value(self) -> int:
        """Of all that the last token sees, itself included."""
        if len(self._sums) == 1:
            return self._sums[0] & MASK
        return sum(mix(one & MASK, group) for group, one in enumerate(self._sums)) & MASK

    def _add(self, group: int, one: int) -> None:
        self._sums[group] += one
        if self._windows[group] is not None:
            self._seen[group].append(one)
