"""Which line of a job runs next.

A bounded window of parsed lines stands between the reader and the engine.  Lines that share a
prefix leave it one after the other, so that the prefix cache still holds what they share (depth
first through the tree of prefixes: the best order for a cache that forgets the oldest, SGLang,
arXiv 2312.07104, theorem 3.1).  Among equals the longest goes first, so that none of the long ones
starts last and runs alone (longest processing time first, Graham 1969).

Where the KV pool is full before the seats are, that would run the long ones few at a time and
preempt them late, and the short ones afterwards: there, lines that share nothing keep their turn,
which mixes them.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from jaxserve.request import SamplingParams

MAX_LINES = 4096  # in a window
MAX_TOKENS = 2_000_000  # of the prompts in a window, about 70 MB
MAX_DELAY = 4 * MAX_LINES  # places by which a line may be put back
MAX_DEPTH = 64  # blocks of a prompt that are compared
MAX_LEADING = 4  # groups that are begun at a time: more would push each other out of the cache
MAX_SKIPPED = 128  # items that are looked at for one that need not wait
_SLACK = 64  # dead entries that are never worth a clean-up


def rank(num_prompt: int, sampling: SamplingParams, max_len: int) -> int:
    """How much of the engine a line takes, the most first: a step for every token it may put out,
    and memory for its prompt all that time.

    A quarter step a prompt token did best, or within 2 % of it, on five simulated jobs (W1 x4 and a
    long-tailed set, each with a roomy and a tight KV pool, and shared prefixes).
    """
    most = min(sampling.max_tokens, max(0, max_len - num_prompt))
    return sampling.n * most + num_prompt // 4


def prefix_keys(prompt: Sequence[int], block_size: int) -> list[int]:
    """One key for each prefix of whole blocks, the shortest first, at most MAX_DEPTH: equal
    prefixes have equal keys.

    The last token of a prompt is always computed, so it counts for none.  Different prefixes with
    one key would only run together for nothing.
    """
    count = min(MAX_DEPTH, (len(prompt) - 1) // block_size)
    if count <= 0:
        return []
    try:
        raw = array("i", prompt[: count * block_size]).tobytes()
    except OverflowError:  # no token ids: the line will be refused
        return []
    size, key, keys = len(raw) // count, 0, list[int]()
    for start in range(0, len(raw), size):
        key = hash((key, raw[start : start + size]))
        keys.append(key)
    return keys


class Taken[T](NamedTuple):
    """An item that came out of a window."""

    place: int  # in the order of arrival
    item: T
    leads: bool  # others wait until its prompt is `computed`


class _Inside[T](NamedTuple):
    item: T
    num_tokens: int
    path: list[int]  # keys of its prefixes


class _Group:
    """The items that begin with one prefix, by rank.  Those that were taken are skipped, and
    cleaned up when they outnumber the others."""

    def __init__(self) -> None:
        self.alive = 0
        self.led = False  # somebody computes the prefix, or has
        self._heap: list[tuple[int, int]] = []  # rank, negative, and place

    def push(self, rank: int, place: int) -> None:
        heapq.heappush(self._heap, (-rank, place))
        self.alive += 1

    def first(self, inside: Collection[int], waits: Callable[[int], bool]) -> int:
        """Whoever is first and does not wait; the first of all when MAX_SKIPPED before him do."""
        skipped: list[tuple[int, int]] = []
        while self._heap and len(skipped) < MAX_SKIPPED:
            place = self._heap[0][1]
            if place in inside:
                if not waits(place):
                    break
                skipped.append(self._heap[0])
            heapq.heappop(self._heap)
        found = len(skipped) < MAX_SKIPPED and bool(self._heap)
        first = self._heap[0][1] if found else skipped[0][1]
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return first

    def left(self, inside: Collection[int]) -> None:
        """One of them is not inside any more."""
        self.alive -= 1
        if len(self._heap) > 2 * self.alive + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in inside]
            heapq.heapify(self._heap)


class Window[T]:
    """Laws: what is put in comes out once; at most `max_items` items are inside, and no more are
    let in at `max_tokens` prompt tokens; the n-th item put in is at the latest the
    n + `max_delay`-th to come out.  An item costs O(blocks of its prompt * log(items)).

    The first of a group goes ahead: while others are there, the rest of its group waits until
    its prompt is `computed` and can be found in the prefix cache.
    """

    def __init__(
        self,
        block_size: int,
        *,
        max_items: int = MAX_LINES,
        max_tokens: int = MAX_TOKENS,
        max_delay: int = MAX_DELAY,
    ) -> None:
        """`block_size`: tokens of a KV block; to have less in common saves nothing."""
        self._block_size = block_size
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._max_delay = max_delay
        self._inside: dict[int, _Inside[T]] = {}  # by place in the order of arrival
        self._groups: dict[int, _Group] = {}
        self._everybody = _Group()
        self._arrivals: deque[int] = deque()
        self._last: list[int] = []  # path of the item that came out last
        self._leading: dict[int, list[int]] = {}  # place of one that came out: keys it computes
        self._cold: set[int] = set()  # all keys of `_leading`
        self._num_tokens = 0
        self._put = self._taken = 0

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def has_room(self) -> bool:
        return len(self) < self._max_items and self._num_tokens < self._max_tokens

    def put(self, item: T, prompt: Sequence[int], rank: int, *, keeps_turn: bool = False) -> None:
        """`rank`: of two that share as much with the item before, the greater one goes first.
        `keeps_turn`: while no item inside begins as it does, this one counts as of rank 0."""
        path = prefix_keys(prompt, self._block_size)
        if keeps_turn and not (path and path[0] in self._groups):
            rank = 0
        place = self._put
        self._put += 1
        self._num_tokens += len(prompt)
        self._inside[place] = _Inside(item, len(prompt), path)
        self._arrivals.append(place)
        self._everybody.push(rank, place)
        for key in path:
            self._groups.setdefault(key, _Group()).push(rank, place)

    def take(self, *, patient: bool = False) -> Taken[T] | None:
        """The next item; None, with `patient`, when it is better to wait until more prompts are
        `computed`.  Raises IndexError when nothing is inside."""
        while self._arrivals[0] not in self._inside:
            self._arrivals.popleft()
        place = self._arrivals[0]
        if self._taken - place < self._max_delay:
            place = self._choose(patient)
            if place is None:
                return None
        self._taken += 1
        item, num_tokens, self._last = self._inside.pop(place)
        self._num_tokens -= num_tokens
        self._everybody.left(self._inside)
        leads: list[int] = []
        for key in self._last:
            group = self._groups[key]
            group.left(self._inside)
            if not group.alive:
                del self._groups[key]
            elif not group.led:
                group.led = True
                leads.append(key)
        if leads:
            self._leading[place] = leads
            self._cold.update(leads)
        return Taken(place, item, bool(leads))

    def computed(self, place: int) -> None:
        """The prompt of a taken item is in the prefix cache, or never will be.  Idempotent."""
        self._cold.difference_update(self._leading.pop(place, ()))

    def _choose(self, patient: bool) -> int | None:
        """Of those that share most with the item that came out last, the greatest rank."""
        for key in reversed(self._last):
            group = self._groups.get(key)
            if group is not None and key not in self._cold:
                place = group.first(self._inside, self._waits)
                if not self._waits(place):
                    return place
        if patient and len(self._leading) >= MAX_LEADING:
            return None
        return self._everybody.first(self._inside, self._waits)

    def _waits(self, place: int) -> bool:
        """Somebody is about to compute a prefix of it."""
        return bool(self._cold) and not self._cold.isdisjoint(self._inside[place].path)
