"""The bucket set of least cost under the scheduler's own snapping, by dynamic programming.

A step of n tokens runs in the smallest bucket that holds it, unless `snap.tokens_to_cut` cuts its
last chunk down to the next smaller one; the tokens cut cost, in the next step, what they lengthen
its decodes.  Going through a set from its smallest bucket up, everything about a step of at most b
tokens is known once all buckets up to b are: its cost depends on those alone.  So sets grow bucket
by bucket, and the cost so far never changes (`Search.added`).

Were only neighbouring buckets involved, a table over (two buckets, how many more) would do.  What a
cut costs later can involve smaller ones too, so that table is made with this part at its least
(`Search.bound`): it bounds from below what a set can still cost, and the sets are searched in the
order of cost so far plus bound (A*), beginning with what a local search finds.  The first complete
set taken out is a best one.  A search that takes too long ends with what it has and its bound.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxserve.lab.demand import Demand
from jaxserve.scheduler import snap
from jaxserve.scheduler.snap import CostTable

MOST_SETS = 400  # partial sets taken out before the search settles for what it has
_NEAR = 3  # candidates to each side that the local search tries for a bucket

type Allowed = Callable[[Sequence[int]], bool]  # of a set; what it refuses, it refuses of more


@dataclasses.dataclass(frozen=True)
class Best:
    """`seconds` of all steps in buckets `sizes`; no set costs less than `bound`."""

    sizes: tuple[int, ...]
    seconds: float
    bound: float

    @property
    def proven(self) -> bool:
        return self.seconds <= self.bound * (1 + 1e-9)


def step_seconds(demand: Demand, table: CostTable) -> float:
    """What a step and the tokens cut from it cost."""
    n, last_chunk, decodes = demand
    cut = snap.tokens_to_cut(n, last_chunk, decodes, table)
    if not cut:
        return table.cost(n)
    later = table.cost(min(decodes + cut, table.sizes[-1])) - table.cost(decodes)
    return table.cost(n - cut) + later


def seconds(demands: Mapping[Demand, int], table: CostTable) -> float:
    return sum(count * step_seconds(demand, table) for demand, count in demands.items())


class Search:
    """Of buckets among `candidates`, the last of which, the token budget, is in every set and holds
    every demand.  `cost`: seconds of a step in a bucket; a larger one counts as at least as dear.
    """

    def __init__(
        self,
        demands: Mapping[Demand, int],
        candidates: Sequence[int],
        cost: Callable[[int], float],
    ) -> None:
        self.sizes = tuple(sorted(set(candidates)))
        self.costs = tuple(np.maximum.accumulate([cost(size) for size in self.sizes]).tolist())
        self._at = {size: at for at, size in enumerate(self.sizes)}
        ordered = sorted(demands.items())
        if ordered and ordered[-1][0].tokens > self.sizes[-1]:
            raise ValueError(f"a step of {ordered[-1][0].tokens} tokens fits no candidate")
        self._demands = ordered
        tokens = np.array([demand.tokens for demand, _ in ordered], np.int64)
        # Demands at `_ends[i - 1]` to `_ends[i]` are those above candidate i - 1 and not above i.
        self._ends = np.searchsorted(tokens, self.sizes, side="right").tolist()
        self._edges = self._least()
        self._bounds: list[np.ndarray] = []
        self._added: dict[tuple[int, ...], float] = {}

    def best_sets(self, most: int, allowed: Allowed = lambda sizes: True) -> list[Best]:
        """The best sets of at most 1, 2, ... `most` buckets; a number for which `allowed` leaves
        no set is left out."""
        found: list[Best] = []
        for number in range(1, most + 1):
            best = self.best(number, allowed, found[-1].sizes if found else ())
            if best is not None:
                found.append(best)
        return found

    def table(self, sizes: Sequence[int]) -> CostTable:
        costs = tuple(self.costs[self._at[size]] for size in sizes)
        return CostTable(tuple(sizes), costs, measured=True)

    def added(self, sizes: tuple[int, ...]) -> float:
        """Seconds of the steps that only the last of `sizes` holds."""
        if sizes in self._added:
            return self._added[sizes]
        below = sizes[-2:-1]
        first = self._ends[self._at[below[0]]] if below else 0
        last = self._ends[self._at[sizes[-1]]]
        table = self.table(sizes)
        total = sum(count * step_seconds(d, table) for d, count in self._demands[first:last])
        self._added[sizes] = total
        return total

    def bound(self, more: int) -> np.ndarray:
        """[lower, last]: the least that the steps above bucket `last` cost with at most `more`
        further buckets, where `lower` is the bucket below `last`; entry 0 is none, entry i
        candidate i - 1."""
        count = len(self.sizes)
        while len(self._bounds) <= more:
            if not self._bounds:
                start = np.full((count + 1, count + 1), math.inf)
                start[:, -1] = 0.0
                self._bounds.append(start)
                continue
            before = self._bounds[-1]
            least = (self._edges + before[None, :, :]).min(axis=2)
            self._bounds.append(np.minimum(before, least))
        return self._bounds[more]

    def best(self, number: int, allowed: Allowed, known: tuple[int, ...] = ()) -> Best | None:
        """Of at most `number` buckets; `known`: a good set of fewer, or ()."""
        top = self.sizes[-1]
        found, found_s = self._local(number, allowed, known)
        lowest = float(self.bound(number)[0, 0])
        queue: list[tuple[float, tuple[int, ...], float]] = [(lowest, (), 0.0)]
        for _ in range(MOST_SETS):
            if not queue:
                lowest = found_s
                break
            lowest, sizes, so_far = heapq.heappop(queue)
            if lowest >= found_s:
                lowest = found_s
                break
            below, last = self._places(sizes)
            bound = self.bound(number - len(sizes) - 1)[last]
            for at in range(last, len(self.sizes)):
                least = so_far + self._edges[below, last, at + 1] + bound[at + 1]
                if least >= found_s:
                    continue
                larger = (*sizes, self.sizes[at])
                if not allowed(larger if larger[-1] == top else (*larger, top)):
                    continue
                total = so_far + self.added(larger)
                if larger[-1] == top and total < found_s:
                    found, found_s = larger, total
                elif larger[-1] != top and total + bound[at + 1] < found_s:
                    heapq.heappush(queue, (total + float(bound[at + 1]), larger, total))
        return None if found is None else Best(found, found_s, min(lowest, found_s))

    def _places(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Entries of the last two of `sizes` in tables that begin with none."""
        below = self._at[sizes[-2]] + 1 if len(sizes) > 1 else 0
        return below, self._at[sizes[-1]] + 1 if sizes else 0

    def _whole(self, sizes: tuple[int, ...]) -> float:
        return sum(self.added(sizes[: count + 1]) for count in range(len(sizes)))

    def _local(
        self, number: int, allowed: Allowed, known: tuple[int, ...]
    ) -> tuple[tuple[int, ...] | None, float]:
        """A good set of at most `number` buckets, from which no single bucket can be moved a little
        to the better; None when nothing tried is allowed."""
        tried: set[tuple[int, ...]] = set()
        found, found_s = None, math.inf

        def better(sizes: set[int]) -> bool:
            nonlocal found, found_s
            ordered = tuple(sorted(sizes))
            if len(ordered) > number or ordered in tried or not allowed(ordered):
                return False
            tried.add(ordered)
            total = self._whole(ordered)
            if total >= found_s:
                return False
            found, found_s = ordered, total
            return True

        better({self.sizes[-1]})
        better(set(self._guess(number)))
        if known:
            for size in self.sizes:
                better({*known, size})
        moved = found is not None
        while moved:
            moved = False
            for size in (found or ())[:-1]:
                at = self._at[size]
                for other in self.sizes[max(0, at - _NEAR) : at + _NEAR + 1]:
                    moved |= better({*(found or ()), other} - {size})
        return found, found_s

    def _guess(self, number: int) -> tuple[int, ...]:
        """The set of the bound."""
        below = last = 0
        sizes = list[int]()
        for more in range(number - 1, -1, -1):
            if last == len(self.sizes):
                break
            following = int((self._edges[below, last] + self.bound(more)[last]).argmin())
            sizes.append(self.sizes[following - 1])
            below, last = last, following
        return tuple(sizes)

    def _least(self) -> np.ndarray:
        """[below, from, to]: the least that the steps above bucket `from` and not above bucket `to`
        cost in a set in which the three are neighbours; infinite where they do not ascend.

        Of a step cut down to `from`, the decodes and the tokens cut from it (its next step) may
        fall into the same bucket, and then cost nothing more: surely when the decodes alone are
        above `below`.  When only both together are, they cost `from` instead of at most `below`.
        """
        count = len(self.sizes)
        edges = np.full((count + 1, count + 1, count + 1), math.inf)
        n, last_chunk, decodes = (
            np.array([demand[part] for demand, _ in self._demands], np.int64) for part in range(3)
        )
        weights = np.array([count for _, count in self._demands], float)
        sizes, costs = np.array([0, *self.sizes]), np.array([0.0, *self.costs])
        for last in range(count + 1):
            first = self._ends[last - 1] if last else 0
            cut, few = n[first:] - sizes[last], decodes[first:]
            may = (cut < last_chunk[first:]) & (few + cut <= sizes[last])
            alone = costs[np.minimum(np.searchsorted(sizes, cut), count)]
            weight, to = weights[first:], sizes[last + 1 :]
            inside = np.where(n[first:][None, :] <= to[:, None], weight[None, :], 0.0)
            for below in range(max(1, last)):
                apart = costs[last] - np.where(few > 0, costs[below], 0.0)
                later = np.where(few + cut > sizes[below], apart, np.where(few > 0, 0.0, alone))
                later = np.where(few > sizes[below], 0.0, later)
                lower = np.where(may, costs[last] + later, math.inf)
                least = np.minimum(lower[None, :], costs[last + 1 :, None])
                edges[below, last, last + 1 :] = (inside * least).sum(axis=1)
        return edges
