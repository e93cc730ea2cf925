"""One input for several machines: shard I of N has the lines whose ordinal is I modulo N.

The ordinal counts the lines that are not blank through the whole input, so the split depends on
nothing else: every machine finds the same one, and neighbours of a kind are spread evenly.
"""

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


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


def mask(shard: Shard | None, lines: int) -> "np.ndarray":
    """bool[lines]: which lines are the shard's, by ordinal."""
    import numpy as np  # slow, and the command line's help needs this module

    mine = np.ones(lines, bool) if shard is None else np.zeros(lines, bool)
    if shard is not None:
        mine[shard.index :: shard.count] = True
    return mine
