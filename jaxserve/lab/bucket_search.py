"""The bucket set of least cost under the scheduler's own snapping, by dynamic programming.

A step of n tokens runs in the smallest bucket that holds it, unless `snap.tokens_to_cut` cuts its
last chunk down to the next smaller one; the tokens cut cost, in the next step, what they lengthen
its decodes.  Going through a set from its smallest bucket up, everything about a step of at most b
tokens is known once all buckets up to b are: its cost depends on those alone.  So sets grow bucket
by bucket, and the cost so far never changes (`_Search.added`).

Were only neighbouring buckets involved, a table over (bucket, how many more) would do.  What a cut
costs later involves smaller ones too, so that table is made with this part at its least
(`_Search.bound`): it bounds from below what a set can still cost, and the sets are searched in the
order of cost so far plus bound (A*).  The first complete set taken out is a best one.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxserve.lab.demand import Demand
from jaxserve.scheduler import snap
from jaxserve.scheduler.snap import CostTable

MOST_SETS = 30_000  # partial sets looked at before the search settles for what it has

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


def best_sets(
    demands: Mapping[Demand, int],
    candidates: Sequence[int],
    cost: Callable[[int], float],
    most: int,
    allowed: Allowed = lambda sizes: True,
) -> list[Best]:
    """The best sets of at most 1, 2, ... `most` of the `candidates`, the last of which, the token
    budget, is in every set and holds every demand.

    `cost`: seconds of a step in a bucket; a larger bucket counts as at least as dear.  A number of
    buckets for which `allowed` leaves no set is left out.
    """
    search = _Search(demands, candidates, cost)
    found = [search.best(number, allowed) for number in range(1, most + 1)]
    return [best for best in found if best is not None]


class _Search:
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

    def table(self, sizes: Sequence[int]) -> CostTable:
        costs = tuple(self.costs[self._at[size]] for size in sizes)
        return CostTable(tuple(sizes), costs, measured=True)

    def added(self, sizes: tuple[int, ...]) -> float:
        """Seconds of the steps that only the last of `sizes` holds."""
        first = self._ends[self._at[sizes[-2]]] if len(sizes) > 1 else 0
        last = self._ends[self._at[sizes[-1]]]
        table = self.table(sizes)
        return sum(count * step_seconds(d, table) for d, count in self._demands[first:last])

    def bound(self, more: int) -> np.ndarray:
        """[candidates + 1]: the least that the steps above a candidate (entry 0: all steps) cost
        with at most `more` further buckets."""
        while len(self._bounds) <= more:
            if not self._bounds:
                start = np.full(len(self.sizes) + 1, math.inf)
                start[-1] = 0.0
                self._bounds.append(start)
            else:
                step = (self._edges + self._bounds[-1][None, :]).min(axis=1)
                self._bounds.append(np.minimum(self._bounds[-1], step))
        return self._bounds[more]

    def best(self, number: int, allowed: Allowed) -> Best | None:
        """Of at most `number` buckets."""
        top = self.sizes[-1]
        found, found_s = None, math.inf
        for sizes in self._guesses(number):
            if allowed(sizes) and (total := self._whole(sizes)) < found_s:
                found, found_s = sizes, total
        queue: list[tuple[float, tuple[int, ...], float]] = [(self.bound(number)[0], (), 0.0)]
        lowest = queue[0][0]
        for _ in range(MOST_SETS):
            if not queue:
                lowest = found_s
                break
            lowest, sizes, so_far = heapq.heappop(queue)
            if lowest >= found_s:
                lowest = found_s
                break
            first = self._at[sizes[-1]] + 1 if sizes else 0
            left = number - len(sizes) - 1
            bound = self.bound(left)
            for at in range(first, len(self.sizes)):
                if bound[at + 1] == math.inf or so_far + self._edges[first, at + 1] >= found_s:
                    continue
                larger = (*sizes, self.sizes[at])
                ends = larger if larger[-1] == top else (*larger, top)
                if not allowed(ends):
                    continue
                total = so_far + self.added(larger)
                if larger[-1] == top and total < found_s:
                    found, found_s = larger, total
                elif larger[-1] != top and total + bound[at + 1] < found_s:
                    heapq.heappush(queue, (total + bound[at + 1], larger, total))
        return None if found is None else Best(found, found_s, min(lowest, found_s))

    def _whole(self, sizes: tuple[int, ...]) -> float:
        return sum(self.added(sizes[: count + 1]) for count in range(len(sizes)))

    def _guesses(self, number: int) -> list[tuple[int, ...]]:
        """Sets to begin with: that of the bound, and the budget alone."""
        at, sizes = 0, list[int]()
        for more in range(number - 1, -1, -1):
            if at == len(self.sizes):
                break
            at = int((self._edges[at] + self.bound(more)).argmin())
            sizes.append(self.sizes[at - 1])
        return [tuple(sizes), self.sizes[-1:]]

    def _least(self) -> np.ndarray:
        """[from, to]: the least that the steps above candidate `from` - 1 and not above `to` - 1
        cost in a set where those two are neighbours; infinite where `to` is not above `from`."""
        count = len(self.sizes)
        edges = np.full((count + 1, count + 1), math.inf)
        n, last_chunk, decodes = (
            np.array([demand[part] for demand, _ in self._demands], np.int64) for part in range(3)
        )
        weights = np.array([count for _, count in self._demands], float)
        sizes, costs = np.array(self.sizes), np.array(self.costs)
        for low in range(count + 1):
            first = self._ends[low - 1] if low else 0
            size = self.sizes[low - 1] if low else 0
            cut = n[first:] - size
            # Beside no decode a cut costs a step of its own, beside some perhaps nothing.
            alone = costs[np.minimum(np.searchsorted(sizes, cut), count - 1)]
            later = np.where(decodes[first:] > 0, 0.0, alone)
            may = (cut < last_chunk[first:]) & (decodes[first:] + cut <= size) & (size > 0)
            lower = np.where(may, (costs[low - 1] if low else 0.0) + later, math.inf)
            for high in range(low + 1, count + 1):
                part = slice(0, self._ends[high - 1] - first)
                least = np.minimum(lower[part], costs[high - 1])
                edges[low, high] = float((weights[first:][part] * least).sum())
        return edges
