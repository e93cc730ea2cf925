"""Mode time: how long the next step may take, and which decodes wait for a prompt.

Token j of an output is due at arrival + TTFT + j * TPOT: an envelope, as FairBatching (arXiv
2510.14392) proposes.  A request that ran ahead of it has a lead, which a burst of prompts may use
up.  Three paces are tried in turn, each against what the prompts need:

1. `steady`: every decode runs, and no gap between two tokens grows beyond TPOT;
2. `lead`: every decode runs, and steps are as long as the prompts need, at most until the first
   deadline;
3. `earliest`: tokens go by deadline, and decodes that are due later wait.

The first under which all prompts are in time is taken, else the last.  The third is the earliest
due date first with the largest batch that the first deadline allows: where a step costs a constant
and so much a token, it misses no deadline that any order of the known work could meet.
"""

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.costs import NO_STEP, StepShape

MANY = 1 << 30
PIECES = 4  # in which prompts are looked at that seem too much at once
APART = 0.98  # two steps in place of one must cost less than this share of it
Floats = NDArray[np.float64]


class Prompt(NamedTuple):
    """Tokens of one request that are to be computed before its next token."""

    due: float
    start: int
    pending: int


class Decoders(NamedTuple):
    """Rows of one token each, one entry a row."""

    due: Floats  # of the next token, by the envelope
    gap_due: Floats  # TPOT after the last one
    contexts: NDArray[np.int32]


class Pace(NamedTuple):
    """What the next step is to keep to."""

    end: float  # when it should be over; inf: no deadline
    held: tuple[int, ...] = ()  # decodes that wait


class Price:
    """Seconds of steps.  `predict` is a cost model's, `sizes` and `rows` are the buckets, `empty`
    is a step of nothing, of the model's windows."""

    def __init__(
        self,
        predict: Callable[[StepShape], float],
        sizes: Sequence[int],
        rows: Sequence[int],
        sampler: str,
        empty: StepShape = NO_STEP,
    ) -> None:
        self._predict, self.sizes, self._rows = predict, sizes, rows
        self._sampler, self.empty = sampler, empty

    def seconds(self, load: StepShape, samples: int) -> float:
        """Of a step with the rows of `load`, of which `samples` sample."""
        if not load.tokens:
            return 0.0
        at = bisect.bisect_left(self._rows, samples)
        rows = self._rows[min(at, len(self._rows) - 1)] if samples else 0
        bucket = self.sizes[bisect.bisect_left(self.sizes, load.tokens)]
        sampler = self._sampler if samples else "none"
        return self._predict(load._replace(bucket=bucket, rows=rows, sampler=sampler))

    def most(
        self, load: StepShape, samples: int, prompt: Prompt, seconds: float, room: int = MANY
    ) -> int:
        """Most tokens of `prompt`, up to `room`, beside `load` in a step of at most `seconds`.

        Where a bucket can be filled it is: a few tokens beyond it would cost the next one.
        """
        room = min(prompt.pending, room, self.sizes[-1] - load.tokens)

        def too_long(tokens: int) -> bool:
            shape = load.with_chunk(prompt.start, tokens)
            return self.seconds(shape, samples + (tokens == prompt.pending)) > seconds

        if room <= 0 or not too_long(room):
            return max(0, room)
        filled = [size - load.tokens for size in self.sizes if 0 < size - load.tokens < room]
        at = bisect.bisect_left(filled, True, key=too_long)
        if at:
            return filled[at - 1]
        return bisect.bisect_left(range(1, filled[0] if filled else room), True, key=too_long)

    def efficient(self, load: StepShape, start: int, share: float) -> float:
        """Seconds of the smallest step beside `load` in which a prompt that is at `start` gets at
        least `share` of the tokens a second of the largest step."""

        def took(size: int) -> float:
            return self.seconds(load.with_chunk(start, size - load.tokens), load.singles)

        largest = self.sizes[-1]
        room, longest = largest - load.tokens, took(largest)
        for size in self.sizes[bisect.bisect_right(self.sizes, load.tokens) : -1]:
            seconds = took(size)
            if (size - load.tokens) * longest >= share * room * seconds:
                return seconds
        return longest


class StepTime:
    """A step as it fills up, and what still fits before it should be over."""

    def __init__(self, price: Price, load: StepShape, seconds: float) -> None:
        self._price, self._load, self._most = price, load, seconds
        self._samples = load.singles

    @property
    def seconds(self) -> float:
        """Of the step as it is."""
        return self._price.seconds(self._load, self._samples)

    def most(self, start: int, pending: int, room: int) -> int:
        """Tokens of a chunk, at most `room`, that fit; a step is never empty."""
        prompt = Prompt(math.inf, start, pending)
        found = self._price.most(self._load, self._samples, prompt, self._most, room)
        return found if found or self._load.tokens else self.least(room)

    def least(self, room: int) -> int:
        """Tokens of a chunk, at most `room`, that cost no more than a small step."""
        at = bisect.bisect_right(self._price.sizes, self._load.tokens)
        sizes = self._price.sizes
        return min(room, sizes[at] - self._load.tokens) if at < len(sizes) else 0

    def add(self, start: int, num_tokens: int, samples: bool) -> None:
        """A chunk runs in the step."""
        self._load = self._load.with_chunk(start, num_tokens)
        self._samples += samples


def decide(begin: float, decoders: Decoders, prompts: Sequence[Prompt], price: Price) -> Pace:
    """The pace of a step that begins at `begin`; `prompts` in the order in which they run."""
    load = price.empty.with_singles(decoders.contexts)
    alone = price.seconds(load, len(decoders.due))
    together = begin + alone <= decoders.due.min(initial=math.inf)
    split = not together and _can_take_turns(begin, decoders, price)
    due, gap_due = (decoders.due, decoders.due) if split else _attainable(begin, alone, decoders)
    prompts = [p if _can_be_met(begin, p, price) else p._replace(due=math.inf) for p in prompts]
    first = min([due.min(initial=math.inf), *(prompt.due for prompt in prompts)])
    if not prompts and not split:
        return Pace(first)
    steady = min(first, gap_due.min(initial=math.inf))
    end = None if split else _pace_in_time(begin, steady, first, load, prompts, price)
    if end is not None:
        if _apart(begin, end, load, prompts[0], price):
            return Pace(end - alone, tuple(range(len(decoders.due))))
        return Pace(end)
    return Pace(first, _waiting(begin, first, decoders._replace(due=due), prompts, price))


def _can_take_turns(begin: float, decoders: Decoders, price: Price) -> bool:
    """Whether steps of some decodes each, by deadline, keep all deadlines where one of all does
    not."""
    order = np.argsort(decoders.due, kind="stable").tolist()
    while order:
        end = float(decoders.due[order[0]])
        count = _most_decodes(begin, end, price.empty, 0, decoders, order, price)
        if not count:
            return False
        load = price.empty.with_singles(decoders.contexts[order[:count]])
        begin += price.seconds(load, count)
        order = order[count:]
    return True


def _attainable(begin: float, alone: float, decoders: Decoders) -> tuple[Floats, Floats]:
    """Deadlines that a step of decodes alone can keep: one that is lost already becomes TPOT after
    the last token, and where that is lost too, nothing is due.  Gaps that no step can keep should
    still be no longer than two such steps, as long as no prompt is late for it."""
    end = begin + alone
    kept = decoders.gap_due >= end
    later = np.where(kept, decoders.gap_due, math.inf)
    due = np.where(decoders.due >= end, decoders.due, later)
    return due, np.where(kept, decoders.gap_due, end + alone)


def _can_be_met(begin: float, prompt: Prompt, price: Price) -> bool:
    return begin + _seconds_alone(prompt, price) <= prompt.due


def _seconds_alone(prompt: Prompt, price: Price) -> float:
    """Of all that is pending, in as few steps as can be."""
    most, (_, start, pending) = price.sizes[-1], prompt
    seconds = 0.0
    while pending > 0:
        tokens = min(pending, most)
        load = price.empty.with_chunk(start, tokens)
        seconds += price.seconds(load, int(tokens == pending))
        start, pending = start + tokens, pending - tokens
    return seconds


def _apart(begin: float, end: float, load: StepShape, prompt: Prompt, price: Price) -> bool:
    """Whether a step of the prompt alone and then one of the decodes cost less than both in one,
    and are over by `end`."""
    tokens = price.most(load, load.singles, prompt, end - begin) if load.singles else 0
    if not tokens:
        return False
    samples = int(tokens == prompt.pending)
    mixed = price.seconds(load.with_chunk(prompt.start, tokens), load.singles + samples)
    pure = price.seconds(price.empty.with_chunk(prompt.start, tokens), samples)
    both = pure + price.seconds(load, load.singles)
    return both < APART * mixed and begin + both <= end


def _pace_in_time(  # noqa: PLR0913  ends of steps, and what is to run in them
    begin: float,
    steady: float,
    first: float,
    load: StepShape,
    prompts: Sequence[Prompt],
    price: Price,
) -> float | None:
    """The end of the shortest step, of `steady` length, twice that and so on until `first`, in
    whose pace all prompts are in time; None: there is none."""

    def in_time(end: float) -> bool:
        return _in_time(begin, end, load, prompts, price)

    if in_time(steady):
        return steady
    if steady == first or not in_time(first):
        return None
    ends = [begin + 2 * (steady - begin)]
    while ends[-1] < first:
        ends.append(begin + 2 * (ends[-1] - begin))
    ends[-1] = first
    return ends[bisect.bisect_left(ends, True, hi=len(ends) - 1, key=in_time)]


def _in_time(
    begin: float, end: float, load: StepShape, prompts: Sequence[Prompt], price: Price
) -> bool:
    """Whether every prompt that has a deadline keeps it in steps like this one, all decodes beside
    it; True only where that is sure for the work that is known."""
    if all(prompt.due == math.inf for prompt in prompts):
        return True
    return any(_sure(begin, end, load, prompts, price, pieces) for pieces in (1, PIECES))


def _sure(  # noqa: PLR0913  as above, and in how many pieces the work is looked at
    begin: float,
    end: float,
    load: StepShape,
    prompts: Sequence[Prompt],
    price: Price,
    pieces: int,
) -> bool:
    """As if every chunk of a piece read the longest context of the piece."""
    now = begin
    for far, parts in _cut(prompts, -(-sum(prompt.pending for prompt in prompts) // pieces)):
        whole = sum(count for count, _ in parts)
        tokens = price.most(load, load.singles, Prompt(end, far, whole + 1), end - begin)
        if not tokens:
            return False
        step = price.seconds(load.with_chunk(far, tokens), load.singles + 1)
        done = 0
        for count, due in parts:
            done += count
            if now + -(-done // tokens) * step > due:
                return False
        now += -(-whole // tokens) * step
    return True


def _cut(prompts: Sequence[Prompt], size: int) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """The work of `prompts` in pieces of `size` tokens: where the longest context of a piece ends,
    and its parts, each of one prompt: how many tokens, and when they are due."""
    far, parts, room = 0, list[tuple[int, float]](), size
    for due, start, pending in prompts:
        while pending:
            count = min(pending, room)
            start, pending, room = start + count, pending - count, room - count
            far = max(far, start)
            parts.append((count, math.inf if pending else due))
            if not room:
                yield far, parts
                far, parts, room = 0, [], size
    if parts:
        yield far, parts


def _waiting(
    begin: float, end: float, decoders: Decoders, prompts: Sequence[Prompt], price: Price
) -> tuple[int, ...]:
    """The decodes that wait when tokens go by deadline until the step is full at `end`."""
    order = np.argsort(decoders.due, kind="stable").tolist()
    dues = decoders.due[order]
    load, samples, taken = price.empty, 0, 0
    for prompt in sorted(prompts, key=lambda prompt: prompt.due):
        before = int(np.searchsorted(dues, prompt.due, side="right"))
        count = _most_decodes(begin, end, load, samples, decoders, order[taken:before], price)
        load = load.with_singles(decoders.contexts[order[taken : taken + count]])
        samples, taken = samples + count, taken + count
        if taken < before:
            return tuple(order[taken:])
        tokens = price.most(load, samples, prompt, end - begin)
        load = load.with_chunk(prompt.start, tokens) if tokens else load
        samples += tokens == prompt.pending
        if tokens < prompt.pending:
            return tuple(order[taken:])
    taken += _most_decodes(begin, end, load, samples, decoders, order[taken:], price)
    return tuple(order[taken:])


def _most_decodes(  # noqa: PLR0913  a step so far, and what may join it
    begin: float,
    end: float,
    load: StepShape,
    samples: int,
    decoders: Decoders,
    order: Sequence[int],
    price: Price,
) -> int:
    """How many of `order` fit beside `load` in a step that ends at `end`."""
    room = min(len(order), price.sizes[-1] - load.tokens)

    def too_many(count: int) -> bool:
        joined = load.with_singles(decoders.contexts[list(order[:count])])
        return begin + price.seconds(joined, samples + count) > end

    return bisect.bisect_left(range(1, room + 1), True, key=too_many)
