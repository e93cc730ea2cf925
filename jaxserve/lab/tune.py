"""A configuration for latency limits: curves, a bound, a simulated sweep, a few measured, a check.

The steps are those by which people tune by hand.  Simulation is cheap and says which
configurations are worth the device's time; what is chosen was measured.
"""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from jaxserve import settings
from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel
from jaxserve.lab import arrivals, simulate
from jaxserve.lab.arrivals import Arrival
from jaxserve.lab.compare import Comparison, Variant
from jaxserve.lab.shapes import shape
from jaxserve.lab.subject import Facts, resolved

BUDGETS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SEQS = (16, 32, 64, 128, 256)
PARTIALS = (1, 2, 8)
OVERLOAD = 2.0  # times what the chosen configuration serves
_CALM = 0.7
_OFFERED = 8  # times the queue: the endless one grows far beyond the bound
_NO_LIMIT_MS = 10_000.0  # to the first token, where none is given
_FINALISTS = 3  # with which partial prefills are varied
_BEYOND = 4  # budgets up to so many times the bound: the limit is on a request's mean gap


@dataclasses.dataclass(frozen=True)
class Limits:
    """Milliseconds; None: no limit."""

    ttft_ms: float | None
    tpot_ms: float | None


@dataclasses.dataclass(frozen=True)
class Load:
    """What is served, and on what."""

    offered: Sequence[Arrival]
    model: CostModel
    facts: Facts
    sampler: str = "greedy"

    @property
    def context(self) -> int:
        """Tokens that a request has on average while it decodes."""
        return round(statistics.mean(a.prompt + a.output / 2 for a in self.offered))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The three settings that are tuned."""

    budget: int
    seqs: int
    partials: int

    @property
    def options(self) -> list[str]:
        return [
            f"scheduler.token_budget={self.budget}",
            f"scheduler.max_seqs={self.seqs}",
            f"scheduler.max_partial_prefills={self.partials}",
        ]

    @property
    def variant(self) -> Variant:
        name = f"budget {self.budget}, seqs {self.seqs}, partials {self.partials}"
        words = [word for option in self.options for word in ("--set", option)]
        return Variant(name, tuple(words))


def current(config: EngineConfig) -> Candidate:
    """What `config` has."""
    rules = config.scheduler
    return Candidate(rules.token_budget, rules.max_seqs, rules.max_partial_prefills)


@dataclasses.dataclass(frozen=True)
class Point:
    """A full step of a budget: decodes of all seats, the rest one chunk."""

    budget: int
    step_ms: float
    tokens_per_s: float


def curve(load: Load, seqs: int) -> list[Point]:
    """What steps of each budget take beside `seqs` decodes of average context."""
    found: list[Point] = []
    for budget in BUDGETS:
        if budget > load.facts.max_len:
            break
        seconds = _full_step_s(load, budget, min(seqs, budget))
        found.append(Point(budget, 1e3 * seconds, budget / seconds))
    return found


def bound(points: Sequence[Point], tpot_ms: float | None) -> int | None:
    """The largest budget of which no full step takes longer than a token may; None: none."""
    if tpot_ms is None:
        return points[-1].budget
    return max((p.budget for p in points if p.step_ms <= tpot_ms), default=None)


def _full_step_s(load: Load, budget: int, seqs: int) -> float:
    chunks = [(0, budget - seqs)] if budget > seqs else []
    context = seqs * load.context
    step = shape(
        budget,
        seqs,
        context,
        chunks,
        rows=seqs,
        sampler=load.sampler,
        windows=load.facts.windows,
    )
    return load.model.predict(step)


@dataclasses.dataclass(frozen=True)
class Simulated:
    candidate: Candidate
    report: dict[str, Any]
    used: int  # seats, at most


@dataclasses.dataclass(frozen=True)
class Plan:
    """What simulation says."""

    curve: list[Point]
    bound: int | None
    simulated: list[Simulated]  # the best first


def plan(config: EngineConfig, load: Load, limits: Limits) -> Plan:
    """Raises ValueError when no configuration can run the load."""
    points = curve(load, min(config.scheduler.max_seqs, len(load.offered)))
    limit = bound(points, limits.tpot_ms)
    simulated = sweep(config, load, limit, limits)
    if not simulated:
        raise ValueError("no configuration can run this workload; is the KV pool too small?")
    return Plan(points, limit, simulated)


def sweep(config: EngineConfig, load: Load, limit: int | None, limits: Limits) -> list[Simulated]:
    """What runs now, budgets with seats, and then partial prefills with the best of these; all that
    can run the load, the best first.  Of those that come to the same settings only one is there,
    what runs now before others.  `limit`: see `bound`."""
    base, known = current(config), dict[str, Simulated]()
    most = min(_BEYOND * (limit or BUDGETS[0]), load.facts.max_len)
    found = _simulate(config, load, [base], limits, known)
    for budget in (b for b in BUDGETS if b <= most):
        for seqs in (s for s in SEQS if s <= budget):
            candidate = Candidate(budget, seqs, base.partials)
            tried = _simulate(config, load, [candidate], limits, known)
            found += tried
            if not tried or tried[0].used < seqs:
                break  # more seats would change nothing
    best = [one.candidate for one in _ranked(found)[:_FINALISTS]]
    others = [dataclasses.replace(one, partials=p) for one in best for p in PARTIALS]
    return _ranked(found + _simulate(config, load, others, limits, known))


def _simulate(
    config: EngineConfig,
    load: Load,
    tried: Sequence[Candidate],
    limits: Limits,
    known: dict[str, Simulated],
) -> list[Simulated]:
    """`known`: by resolved settings, what was simulated before; new ones are put there."""
    found: list[Simulated] = []
    for candidate in tried:
        with contextlib.suppress(ValueError):  # too few blocks for a prompt: it cannot run
            made = resolved(settings.assign(config, candidate.options), load.facts)
            key = settings.dump(made)
            if key not in known:
                known[key] = _run(config, load, candidate, limits)
            found.append(known[key])
    return found


def _ranked(found: Sequence[Simulated]) -> list[Simulated]:
    unique = {one.candidate: one for one in found}.values()
    return sorted(unique, key=lambda one: merit(one.report), reverse=True)


def merit(report: dict[str, Any]) -> tuple[float, ...]:
    """Goodput decides; of equals throughput, and then the shorter wait."""
    good, first = report["goodput"]["requests_per_s"], report["ttft_s"]["p99"]
    return (round(good, 3), round(report["output_tokens_per_s"], 1), -(first or math.inf))


def _run(
    config: EngineConfig,
    load: Load,
    candidate: Candidate,
    limits: Limits,
    *,
    offered: Sequence[Arrival] | None = None,
    max_waiting: int | None = None,
) -> Simulated:
    options = candidate.options
    if max_waiting is not None:
        options.append(f"scheduler.max_waiting={max_waiting}")
    made = resolved(settings.assign(config, options), load.facts)
    played = simulate.play(
        made,
        load.model,
        offered or load.offered,
        sampler=load.sampler,
        windows=load.facts.windows,
    )
    report = simulate.report(played, limits.ttft_ms, limits.tpot_ms)
    return Simulated(candidate, report, max(step.rows for step in played.steps))


def best_few(found: Sequence[Simulated], base: Candidate, count: int) -> list[Candidate]:
    """What is measured: `base`, and the best `count` others of which no two differ in partial
    prefills alone, since those differ least."""
    picked: list[Candidate] = []
    for one in found:
        c = one.candidate
        if c != base and all((c.budget, c.seqs) != (p.budget, p.seqs) for p in picked):
            picked.append(c)
    return [base, *picked[:count]]


@dataclasses.dataclass(frozen=True)
class Choice:
    candidate: Candidate
    why: str


def choose(measured: Comparison, tried: Sequence[Candidate]) -> Choice:
    """The best of what was measured; the first, which is what runs now, unless another is better by
    more than noise.

    Raises ValueError when the first failed.
    """
    by_name = {result.name: result for result in measured.results}
    base = by_name.get(tried[0].variant.name)
    if base is None:
        raise ValueError(
            f"the configuration as it is failed: {next(iter(measured.failed.values()))}"
        )
    better: list[tuple[float, Candidate, str]] = []
    for name in (measured.main, "output tokens/s"):
        for candidate in tried[1:]:
            result = by_name.get(candidate.variant.name)
            figure = None if result is None else result.figures.get(name)
            if figure is None or figure.versus is None or figure.versus.low <= 0:
                continue
            mean, first = figure.interval.mean, base.figures[name].interval.mean
            better.append((mean, candidate, f"{name} {mean:.2f} against {first:.2f}"))
        if better:
            _, candidate, why = max(better, key=lambda one: one[0])
            return Choice(candidate, why)
    return Choice(tried[0], "nothing measured is better than it by more than noise")


@dataclasses.dataclass(frozen=True)
class Overload:
    """The chosen configuration at OVERLOAD times what it serves; goodput in requests a second."""

    rate: float  # requests a second
    max_queue: int  # requests that may wait, where the queue is bounded
    calm: float  # goodput at 0.7 times what it serves
    unbounded: float
    bounded: float
    refused: float  # share, with the bounded queue


def overload(config: EngineConfig, load: Load, chosen: Candidate, limits: Limits) -> Overload:
    """The queue is bounded so that whoever is taken waits half of the limit on the first token."""
    served = _run(config, load, chosen, limits).report["requests_per_s"]
    seconds = (limits.ttft_ms or _NO_LIMIT_MS) / 1e3
    queue = max(1, round(served * seconds / 2))

    def at(rate: float, **more: Any) -> dict[str, Any]:
        count = min(max(_OFFERED * queue, 100), 1000)
        offered = arrivals.again(load.offered, count, rate)
        return _run(config, load, chosen, limits, offered=offered, **more).report

    def good(report: dict[str, Any]) -> float:
        return report["goodput"]["requests_per_s"]

    bounded = at(OVERLOAD * served, max_waiting=queue)
    return Overload(
        rate=OVERLOAD * served,
        max_queue=queue,
        calm=good(at(_CALM * served)),
        unbounded=good(at(OVERLOAD * served)),
        bounded=good(bounded),
        refused=bounded["refused"] / bounded["requests"],
    )


@dataclasses.dataclass(frozen=True)
class Tuned:
    """All of it."""

    limits: Limits
    plan: Plan
    tried: list[Candidate]  # those that were measured
    measured: Comparison
    choice: Choice
    overload: Overload
