"""Requests for a simulation: when they come, how long they are; recorded or drawn from a seed."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from jaxserve.lab.trace import Trace
from jaxserve.offline.workload import WorkItem

_P90 = 1.2815515655446004  # of the standard normal distribution


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One request; its tokens do not matter, only how many there are and which are shared."""

    at: float  # seconds since the start
    prompt: int
    output: int
    shared: int = 0  # leading tokens of the prompt that all requests with such tokens have alike
    is_late: bool = False  # comes when all others have their first tokens (`workload.LATE_AFTER`)
    ids: tuple[int, ...] = ()  # the prompt, where it is known


def of_workload(items: Sequence[WorkItem]) -> list[Arrival]:
    """A workload as `jaxserve bench` replays it."""
    return [
        Arrival(
            at=0.0,
            prompt=len(item.prompt_token_ids),
            output=item.max_tokens,
            is_late=item.is_late,
            ids=item.prompt_token_ids,
        )
        for item in items
    ]


def of_trace(trace: Trace) -> list[Arrival]:
    """The requests of a recorded run as they came.  A prompt's tokens are not recorded, so what the
    prefix cache had of it becomes one prefix that all share.

    Raises ValueError for a trace without requests.
    """
    rows = [row for row in trace.requests if row.output]
    if not rows:
        raise ValueError("the trace has no request that got a token")
    start = min(row.arrived for row in rows)
    found = [
        Arrival((row.arrived - start) / 1e6, row.prompt, row.output, min(row.cached, row.prompt))
        for row in rows
    ]
    return sorted(found, key=lambda arrival: arrival.at)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers from `low` to `high`: log-normal with a median and a ninth
    decile, or even between the two."""

    low: int
    high: int
    median: float | None = None
    p90: float | None = None

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.median is None or self.p90 is None:
            return rng.integers(self.low, self.high + 1, count).tolist()
        sigma = math.log(self.p90 / self.median) / _P90
        drawn = rng.lognormal(math.log(self.median), sigma, count)
        return np.clip(np.rint(drawn), self.low, self.high).astype(int).tolist()


def lengths(text: str, most: int) -> Lengths:
    """`512`: always; `16..2048`: evenly between; `1730/5696`: log-normal with this median and this
    90th percentile.  Nothing is longer than `most`.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"(\d+)(?:(\.\.|/)(\d+))?", text.strip())
    if match:
        low, kind, high = int(match[1]), match[2], int(match[3] or match[1])
        if kind == "/" and 1 <= low < high:
            return Lengths(1, most, low, high)
        if kind != "/" and 1 <= low <= high <= most:
            return Lengths(low, high)
    raise ValueError(
        f"lengths {text!r}: write 512, 16..2048 (evenly between) or 1730/5696 (median and 90th "
        f"percentile of a log-normal distribution), from 1 to {most}"
    )


def generated(  # noqa: PLR0913
    count: int, rate: float, prompt: Lengths, output: Lengths, *, burst: int = 1, seed: int = 0
) -> list[Arrival]:
    """`count` requests, `rate` a second on average: bursts of `burst` at the times of a Poisson
    process; one at a time is Poisson itself.  The same seed gives the same lengths at any rate."""
    rng = np.random.default_rng(seed)
    prompts, outputs = prompt.draw(rng, count), output.draw(rng, count)
    gaps = rng.exponential(1.0, -(-count // burst)) * (burst / rate)
    times = np.repeat(np.cumsum(gaps), burst)[:count]
    rows = zip((times - times[0]).tolist(), prompts, outputs, strict=True)
    return [Arrival(at, p, o) for at, p, o in rows]


def again(known: Sequence[Arrival], count: int, rate: float, seed: int = 0) -> list[Arrival]:
    """`count` requests like those known, in turn, as a Poisson process of `rate` a second."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count)).tolist()
    return [
        dataclasses.replace(known[n % len(known)], at=at - times[0], is_late=False)
        for n, at in enumerate(times)
    ]


def prompts(arrivals: Sequence[Arrival], vocab: int) -> Iterator[tuple[int, ...]]:
    """Token ids of each: unknown ones differ from those of all others in their first block."""
    filler = tuple(i % vocab for i in range(max((a.prompt for a in arrivals), default=0)))
    for number, arrival in enumerate(arrivals):
        if arrival.ids:
            yield arrival.ids
            continue
        head = filler[: arrival.shared]
        own = (number % vocab, number // vocab % vocab, number // vocab**2 % vocab)
        yield (head + own + filler)[: arrival.prompt]
