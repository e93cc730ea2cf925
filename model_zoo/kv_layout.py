"""Which layers share a block table, and where the KV array holds each.  No jax: the host needs it.

Layers that see equally far need the same blocks of tokens.  They are cut into groups of equally
many layers, so that a block is the KV of a few tokens in any one group, and one pool of blocks
serves all groups: what one group lets go another can take.  (The idea is that of Jenga, arXiv
2503.18292: pages of one size for layers of different kinds.)
"""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MOST_UNUSED = 6  # at most one in so many places for a layer holds none, to have fewer groups


class KVLayout(NamedTuple):
    """Layer l is in group groups[l], and its KV at index places[l] of the array's first axis."""

    depth: int  # layers of a group: the first axis of the array
    windows: tuple[int | None, ...]  # of each group; None: sees all
    groups: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        return len(self.windows)


def kv_layout(num_layers: int, windows: Sequence[int | None]) -> KVLayout:
    """`windows`: of each layer; empty: all see everything.

    One group where all layers see equally far.  Otherwise groups of as many layers as possible, at
    most as many as the rarest window has, of which few are places without a layer.
    """
    windows = windows or [None] * num_layers
    counts = collections.Counter(windows)
    depth = max(
        depth
        for depth in range(1, min(counts.values()) + 1)
        if _MOST_UNUSED * _unused(counts.values(), depth) <= num_layers
    )
    groups, places = [0] * num_layers, [0] * num_layers
    of_group: list[int | None] = []
    for window in sorted(counts, key=lambda window: (window is not None, window or 0)):
        layers = [layer for layer in range(num_layers) if windows[layer] == window]
        for nth, layer in enumerate(layers):
            groups[layer] = len(of_group) + nth // depth
            places[layer] = nth % depth
        of_group += [window] * -(-len(layers) // depth)
    return KVLayout(depth, tuple(of_group), tuple(groups), tuple(places))


def _unused(counts: Iterable[int], depth: int) -> int:
    """Places without a layer."""
    return sum(-count % depth for count in counts)
