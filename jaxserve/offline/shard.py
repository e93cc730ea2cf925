"""One input for several machines: shard I of N has the lines whose ordinal is I modulo N.

The ordinal counts the lines that are not blank through the whole input, so the split depends on
nothing else: every machine finds the same one, and neighbours of a kind are spread evenly.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxserve.offline.jsonl import Line


class Shard(NamedTuple):
    index: int  # from 0
    count: int


def parse(text: str) -> Shard:
    """`I/N` with 0 <= I < N.  Raises ValueError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if found is None or not int(found[1]) < int(found[2]):
        raise ValueError(f"{text!r} is not I/N with I from 0 to N - 1")
    return Shard(int(found[1]), int(found[2]))


def name(shard: Shard | None) -> str | None:
    return None if shard is None else f"{shard.index}/{shard.count}"


def size(shard: Shard | None, lines: int) -> int:
    """Lines of the shard, of so many in all."""
    return lines if shard is None else len(range(shard.index, lines, shard.count))


def select(lines: Iterable[Line], shard: Shard | None) -> Iterator[Line]:
    """The lines of the shard; every line keeps its place in the whole input."""
    for line in lines:
        if shard is None or line.place.index % shard.count == shard.index:
            yield line
