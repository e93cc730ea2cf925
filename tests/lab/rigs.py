"""Engines in virtual time whose runs are recorded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxserve.batch.buckets import resolve
from jaxserve.batch.step import Batch, StepResult
from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel, StepShape, no_step
from jaxserve.engine import Engine, ModelLimits
from jaxserve.kv.groups import FULL, Windows
from jaxserve.lab import trace
from jaxserve.lab.record import Recording, header_of
from jaxserve.request import SamplingParams

VOCAB = 50
EOS = 3


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shape_of_batch(batch: Batch, windows: Windows = FULL) -> StepShape:
    """From the arrays alone, by other code than the builder's."""
    x = batch.inputs
    counts = np.diff(x.query_starts)
    lens = x.kv_lens[counts > 0]
    counts = counts[counts > 0]
    shape = no_step(windows).with_singles(lens[counts == 1])
    for length, count in zip(lens[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        shape = shape.with_chunk(length - count, count)
    return shape._replace(bucket=batch.token_bucket, rows=batch.row_bucket, sampler=batch.sampler)


class TimedRunner:
    """The next token is the last one plus one; a step takes `seconds(batch)` of virtual time."""

    def __init__(self, clock: Clock, seats: int, seconds: Callable[[Batch], float]) -> None:
        self.clock, self.seconds = clock, seconds
        self.busy_until = 0.0
        self._last = np.zeros(seats + 1, np.int64)

    def dispatch(self, batch: Batch) -> tuple[StepResult, float]:
        seconds = self.seconds(batch)
        self.busy_until = max(self.busy_until, self.clock.now) + seconds
        inputs, count = batch.inputs, batch.num_samples
        tokens = np.zeros(0, np.int32)
        if batch.samples is not None:
            at = np.minimum(batch.samples.token_index, len(inputs.tokens) - 1)
            tokens = ((inputs.positions[at] * 7 + 11) % VOCAB).astype(np.int32)
        bad = np.zeros(len(tokens), bool)
        assert count <= max(1, len(tokens))
        return StepResult(tokens, bad, None, (), seconds), self.busy_until

    def result(self, handle: tuple[StepResult, float]) -> StepResult:
        result, done = handle
        self.clock.now = max(self.clock.now, done)
        return result


def affine(batch: Batch) -> float:
    """2 ms and 20 us a token of the bucket."""
    return 0.002 + 20e-6 * batch.token_bucket


class Rig:
    """An engine with a recorder; `run` steps it until it is idle."""

    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        *,
        seconds: Callable[[Batch], float] = affine,
        max_len: int = 1000,
        costs: CostModel | None = None,
        windows: Windows = FULL,
    ) -> None:
        self.clock = Clock()
        self.config = resolve(config, max_len, 1)
        self.runner = TimedRunner(self.clock, self.config.scheduler.max_seqs, seconds)
        limits = ModelLimits(VOCAB, frozenset({EOS}), windows)
        self.records = []
        self.engine = Engine(
            self.config, self.runner, limits, clock=self.clock, on_step=self.records.append
        )
        if costs is not None:
            self.engine.set_costs(costs, follow=False)
        header = header_of(self.engine, [], "virtual")
        self.path = path
        self.recording = Recording(path, self.engine, header, clock=self.clock)

    def add(self, prompt: list[int], max_tokens: int, **more):
        sampling = SamplingParams(
            **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more}
        )
        return self.engine.add(prompt, sampling)

    def step(self) -> None:
        self.engine.step()
        self.clock.now += 1e-4

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def trace(self) -> trace.Trace:
        self.recording.close()
        return trace.load(self.path)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(5 * i + 11 * salt + i * i) % VOCAB for i in range(length)]
