"""What steps cost on the device that is here: made-up steps of many shapes, run in rounds, fitted.

Every round runs every shape once, in an order of its own, so that what drifts (temperature, other
programs) falls on all shapes alike; a round's own factor is taken out, and the least over rounds is
what a shape takes: whatever disturbs a run only makes it longer.  Some shapes are drawn at random
and kept out of the fit: they say how well the model predicts.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxserve.batch.step import Batch, StepResult
from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel, StepShape
from jaxserve.engine import Engine
from jaxserve.lab import fit
from jaxserve.lab.fit import Errors
from jaxserve.lab.probes import Probe, Probes
from jaxserve.metrics import StepRecord
from jaxserve.request import SamplingParams

LEAST_ROUNDS = 3
FITTED, HELD_OUT = 40, 24  # shapes drawn at random
_LONGEST = 4096  # tokens of a context; longer ones lie on the same line
_HOST_ROWS = (1, 4, 16, 64, 256)

Floats = NDArray[np.float64]


class Runner(Protocol):
    def dispatch(self, batch: Batch) -> Any: ...

    def result(self, handle: Any) -> StepResult: ...


@dataclasses.dataclass(frozen=True)
class Point:
    """A shape of a curve: `x` is what varies along it."""

    x: int
    seconds: float
    predicted: float


@dataclasses.dataclass(frozen=True)
class Profile:
    costs: CostModel
    held_out: Errors  # of shapes that were not fitted
    fitted: Errors
    noise: Errors  # of a single run against what its shape takes: what no model can predict
    service: Errors | None  # of the steps of an engine that served made-up requests
    curves: dict[str, dict[str, list[Point]]]  # plot -> series -> points
    pairs: list[tuple[float, float]]  # predicted and measured seconds of held-out shapes
    rounds: int
    shapes: int
    seconds: float  # that all took


@dataclasses.dataclass(frozen=True)
class Target:
    """What is measured, idle.  `records` is what the engine appends its steps to."""

    config: EngineConfig  # resolved
    runner: Runner
    engine: Engine
    records: list[StepRecord]


def profile(
    target: Target,
    seconds: float,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    note: Callable[[str], None] = lambda line: None,
) -> Profile:
    """Measures for about `seconds`, at least three rounds.  The KV cache is overwritten.

    Raises ValueError when steps take no time, as without a device.
    """
    config, runner, engine = target.config, target.runner, target.engine
    start, rng = clock(), random.Random(seed)
    windows = engine.limits.windows
    fits = _Room(config, len(windows))
    curves = _curves(config, fits)
    drawn = _drawn(config, fits, rng, FITTED + HELD_OUT)
    probes = list(dict.fromkeys([p for c in curves.values() for s in c.values() for _, p in s]))
    probes = [*(p for p in probes if p not in drawn), *drawn]
    made = Probes(config, engine.limits.vocab_size, windows)
    batches = [made.batch(probe) for probe in probes]
    shapes = [batch.shape for batch in batches]
    rounds: list[list[float]] = []
    while len(rounds) < LEAST_ROUNDS or clock() - start < seconds:
        order = list(range(len(batches)))
        rng.shuffle(order)
        took = [0.0] * len(batches)
        for at in order:
            took[at] = runner.result(runner.dispatch(batches[at])).device_s
        if not min(took) > 0:
            raise ValueError("the runner reports no device time; there is nothing to fit")
        rounds.append(took)
        note(f"round {len(rounds)}: {len(batches)} shapes, {clock() - start:.0f} s")
    engine.kv.forget_all()
    times, noise = settle(rounds)
    used = len(probes) - HELD_OUT
    costs = fit.fit(shapes[:used], times[:used].tolist())
    costs = _with_host(costs, target)
    predicted = [costs.predict(shape) for shape in shapes]
    known = {p: (t, s) for p, t, s in zip(probes, times.tolist(), predicted, strict=True)}
    return Profile(
        costs=costs,
        held_out=fit.errors(predicted[used:], times[used:].tolist()),
        fitted=fit.errors(predicted[:used], times[:used].tolist()),
        noise=noise,
        service=_service(costs, target.records),
        curves={
            plot: {name: [Point(x, *known[p]) for x, p in s] for name, s in series.items()}
            for plot, series in curves.items()
        },
        pairs=list(zip(predicted[used:], times[used:].tolist(), strict=True)),
        rounds=len(rounds),
        shapes=len(probes),
        seconds=clock() - start,
    )


def settle(rounds: Sequence[Sequence[float]]) -> tuple[Floats, Errors]:
    """Seconds of every shape undisturbed, and how far single runs are from them; `rounds[r][shape]`
    above 0."""
    y = np.asarray(rounds, float)
    logs = np.log(y)
    middle = np.median(logs, axis=0)
    factors = np.zeros((len(y), 1))
    for _ in range(3):
        factors = np.median(logs - middle, axis=1, keepdims=True)
        factors -= np.median(factors)
        middle = np.median(logs - factors, axis=0)
    times = np.exp(np.min(logs - factors, axis=0))
    return times, fit.errors(np.broadcast_to(times, y.shape).ravel().tolist(), y.ravel().tolist())


type _Series = dict[str, list[tuple[int, Probe]]]


def _curves(config: EngineConfig, fits: "_Room") -> dict[str, _Series]:
    """What is measured along a line, for the plots as well as for the fit."""
    sizes, seats = config.buckets.tokens, config.scheduler.max_seqs
    longest = min(config.model.max_len, _LONGEST)
    contexts = sorted({longest, longest // 2, longest // 4, longest // 16, 1})
    buckets = [(size, Probe((), ((0, size),), "none")) for size in sizes if size > 1]
    singles = [(size, Probe((1,) * size, (), "greedy")) for size in sizes if size <= seats]
    some = sorted({1, min(16, seats), seats})
    chunks = sorted({size for size in (64, sizes[-1] // 2, sizes[-1]) if 1 < size < longest})
    samplers = [kind for kind, on in _samplers(config).items() if on]

    def decode(rows: int) -> list[tuple[int, Probe]]:
        found = [(c, Probe((c,) * rows, (), "greedy")) for c in contexts if c > 0]
        return [(c, probe) for c, probe in found if fits(probe)]

    def prefill(size: int) -> list[tuple[int, Probe]]:
        starts = [c for c in [0, *contexts[1:]] if c + size <= config.model.max_len]
        found = [(c, Probe((), ((c, size),), "none")) for c in starts]
        return [(c, probe) for c, probe in found if fits(probe)]

    def mixed(size: int) -> list[tuple[int, Probe]]:
        rows = sorted({1, *(n for n in (seats // 4, seats // 2, seats - 1) if n > 0)})
        found = [(n, Probe((contexts[1],) * n, ((0, size - n),), "greedy")) for n in rows]
        return [(n, probe) for n, probe in found if size - n > 1 and n < seats and fits(probe)]

    return {
        "T(bucket)": {"prefill": buckets, "decode": singles},
        "T_decode(context)": {f"{rows} rows": decode(rows) for rows in some},
        "T_prefill(prefix)": {f"{size} tokens": prefill(size) for size in chunks},
        "T_mixed(decodes)": {f"{size} tokens": mixed(size) for size in chunks},
        "T_sample(rows)": {
            kind: [(rows, Probe((1,) * rows, (), kind)) for rows in config.buckets.rows]
            for kind in samplers
        },
    }


def _samplers(config: EngineConfig) -> dict[str, bool]:
    on = config.sampling
    if config.runner.deterministic:
        return {"full" if on.penalties else "random" if on.random else "greedy": True}
    return {"greedy": True, "random": on.random, "full": on.penalties}


def _drawn(config: EngineConfig, fits: "_Room", rng: random.Random, count: int) -> list[Probe]:
    """Shapes as they occur: some decodes of mixed contexts, up to three chunks beside them."""
    budget, seats = config.scheduler.token_budget, config.scheduler.max_seqs
    longest = min(config.model.max_len, _LONGEST)
    kind = next(iter(_samplers(config)))
    found: dict[Probe, None] = {}
    for _ in range(50 * count):
        if len(found) == count:
            break
        rows = rng.choice([0, rng.randint(1, seats), rng.randint(1, seats)])
        contexts = tuple(round(longest ** rng.uniform(0.2, 1.0)) for _ in range(rows))
        chunks: list[tuple[int, int]] = []
        left = min(budget - rows, longest)
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            if left < 2 or rows + len(chunks) == seats:
                break
            tokens = left if rng.random() < 0.4 else rng.randint(2, left)
            start = rng.choice([0, rng.randint(0, longest - tokens)])
            chunks.append((start, tokens))
            left -= tokens
        probe = Probe(contexts, tuple(chunks), kind)
        if probe.tokens and fits(probe):
            found[probe] = None
    return list(found)


class _Room:
    """Whether a probe has blocks of its own for all its rows."""

    def __init__(self, config: EngineConfig, groups: int) -> None:
        self._blocks, self._size = config.cache.num_blocks // groups, config.cache.block_size

    def __call__(self, probe: Probe) -> bool:
        ends = [*probe.contexts, *(start + n for start, n in probe.chunks)]
        return sum(-(-end // self._size) for end in ends) <= self._blocks


def _with_host(costs: CostModel, target: Target) -> CostModel:
    """With what the host takes, from an engine that serves requests of a few rows and many."""
    config, engine, records = target.config, target.engine, target.records
    records.clear()
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    length = max(1, min(24, config.model.max_len - 8))
    for rows in _HOST_ROWS:
        for number in range(min(rows, config.scheduler.max_seqs)):
            engine.add([1 + (number + i) % 5 for i in range(length)], asked)
        while engine.has_work:
            engine.step()
    engine.kv.forget_all()
    seconds = [r.schedule_s + r.build_s + r.dispatch_s + r.update_s for r in records]
    base, row = fit.host([record.rows for record in records], seconds)
    return dataclasses.replace(costs, host=base, host_row=row)


def _service(costs: CostModel, records: Sequence[StepRecord]) -> Errors | None:
    """Of steps that an engine made itself; none of them were fitted."""
    ran: list[tuple[StepShape, float]] = [(r.shape, r.device_s) for r in records if r.device_s > 0]
    if not ran:
        return None
    return fit.errors([costs.predict(shape) for shape, _ in ran], [s for _, s in ran])
