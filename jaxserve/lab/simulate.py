"""The production scheduler and engine in virtual time: what a load would meet on a device of which
only the costs are known.

Nothing of the engine is replaced but its runner and its clock, so queues, chunks, snapping,
preemptions and overlap are those of a real run.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel
from jaxserve.engine import Engine, ModelLimits, QueueFull
from jaxserve.kv.groups import FULL, Windows
from jaxserve.lab import arrivals as loads
from jaxserve.lab.arrivals import Arrival
from jaxserve.lab.probes import SAMPLING
from jaxserve.lab.trace import Trace
from jaxserve.lab.virtual import Clock, ShapeBuilder, VirtualRunner
from jaxserve.metrics import StepRecord
from jaxserve.offline import figures
from jaxserve.offline.workload import LATE_AFTER, Replay
from jaxserve.request import Request, SamplingParams

VOCAB = 1 << 20
MakeEngine = Callable[..., Engine]  # called as `Engine`; a simulation of other rules gives its own


@dataclasses.dataclass(frozen=True)
class Played:
    """What happened, in virtual seconds; lists are in the order of `served`."""

    config: EngineConfig
    offered: list[Arrival]
    served: list[Arrival]  # the others were refused: the queue was full
    requests: list[Request]
    replay: Replay
    steps: list[StepRecord]


def play(
    config: EngineConfig,
    model: CostModel,
    offered: Sequence[Arrival],
    *,
    sampler: str = "greedy",
    windows: Windows = FULL,
    make_engine: MakeEngine = Engine,
) -> Played:
    """Runs the load to its end.  `config` is resolved; `offered` in the order of arrival; `sampler`
    is a name of SAMPLING; `windows` are those of the groups of layers.

    Raises ValueError for a request that can never run under the config.
    """
    clock = Clock()
    steps: list[StepRecord] = []
    engine = make_engine(
        config,
        VirtualRunner(clock, model),
        ModelLimits(VOCAB, frozenset(), windows),
        clock=clock,
        on_step=steps.append,
        make_builder=ShapeBuilder,
    )
    engine.set_costs(model)
    _warm_prefix(engine, clock, offered, steps)
    player = _Player(engine, clock, offered, sampler)
    player.run()
    return Played(
        config=config,
        offered=list(offered),
        served=player.served,
        requests=player.requests,
        replay=Replay(
            start=0.0,
            end=clock.now,
            submitted=[request.arrival for request in player.requests],
            times=player.times,
            arrived=player.late_at,
            outputs=[],
        ),
        steps=steps,
    )


class _Player:
    """Hands requests to the engine when they come, and notes when their tokens do."""

    def __init__(
        self, engine: Engine, clock: Clock, offered: Sequence[Arrival], sampler: str
    ) -> None:
        self.engine, self.clock = engine, clock
        self._wanted = functools.lru_cache(maxsize=4096)(
            functools.partial(_sampling, SAMPLING[sampler])
        )
        self.served: list[Arrival] = []
        self.requests: list[Request] = []
        self.times: list[list[float]] = []
        self.late_at: float | None = None
        pairs = list(zip(offered, loads.prompts(offered, engine.limits.vocab_size), strict=True))
        self._due = [pair for pair in pairs if not pair[0].is_late]
        self._late = [pair for pair in pairs if pair[0].is_late]
        self._behind = len(self._due)  # of these, how many have fewer than LATE_AFTER tokens
        self._of: dict[Request, list[float]] = {}

    def run(self) -> None:
        engine, clock = self.engine, self.clock
        start, at = clock.now, 0
        while True:
            while at < len(self._due) and start + self._due[at][0].at <= clock.now:
                self._submit(*self._due[at], start + self._due[at][0].at)
                at += 1
            if not engine.has_work:
                if at == len(self._due):
                    break
                clock.now = start + self._due[at][0].at
                continue
            outputs, now = engine.step(), clock.now
            for output in outputs:
                times = self._of[output.request]
                times += [now] * len(output.tokens)
                self._behind -= len(times) == LATE_AFTER
            if self._late and not self._behind:
                self.late_at = clock.now
                for arrival, prompt in self._late:
                    self._submit(arrival, prompt, clock.now)
                self._late = []

    def _submit(self, arrival: Arrival, prompt: tuple[int, ...], at: float) -> None:
        """`at`: when it came, which may be during the last step."""
        try:
            (request,) = self.engine.add(prompt, self._wanted(arrival.output))
        except QueueFull:
            self._behind -= not arrival.is_late
            return
        request.arrival = at
        times = self._of[request] = []
        self.served.append(arrival)
        self.requests.append(request)
        self.times.append(times)


def _sampling(like: SamplingParams, max_tokens: int) -> SamplingParams:
    return dataclasses.replace(like, max_tokens=max_tokens, ignore_eos=True)


def sampler_of(trace: Trace) -> str:
    """The commonest sampling program of a recorded run."""
    used = collections.Counter(step.sampler for step in trace.steps if step.sampler in SAMPLING)
    return max(used, key=lambda name: used[name], default="greedy")


def report(played: Played, slo_ttft_ms: float | None, slo_tpot_ms: float | None) -> dict[str, Any]:
    """The figures of a run, those of `jaxserve bench` under the same names.  A refused request
    counts as offered and never as good."""
    replay, requests, steps = played.replay, played.requests, played.steps
    items = [figures.Sizes(a.prompt, a.is_late) for a in played.served]
    good = figures.goodput(replay, slo_ttft_ms, slo_tpot_ms)
    good["share"] = (good["share"] or 0.0) * len(requests) / len(played.offered)
    kv = [step.kv_used / step.kv_blocks for step in steps]
    weights = [step.device_s for step in steps]
    known = figures.step_figures(steps, replay)
    for name in ("host_ms_per_step", "phase_s"):  # of this process, not of virtual time
        del known[name]
    return {
        "requests": len(played.offered),
        "refused": len(played.offered) - len(requests),
        "requests_per_s": len(requests) / replay.end,
        **figures.latency_figures(items, replay),
        "queue_s": figures.spread([r.admitted - r.arrival for r in requests]),
        "goodput": good,
        "kv": {
            "mean": sum(map(operator.mul, kv, weights)) / sum(weights),
            "max": max(kv),
        },
        **known,
    }


def _warm_prefix(
    engine: Engine, clock: Clock, offered: Sequence[Arrival], steps: list[StepRecord]
) -> None:
    """Computes the shared prefix, which was in the cache before the load came."""
    shared = max((arrival.shared for arrival in offered), default=0)
    if not shared:
        return
    prompt = next(loads.prompts([Arrival(0.0, shared, 1, shared)], engine.limits.vocab_size))
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    while engine.has_work:
        engine.step()
    clock.now = 0.0
    steps.clear()
