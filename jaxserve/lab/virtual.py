"""A device that is not there: its steps take the time that a cost model predicts, on a clock that
is moved and never waited for."""

import bisect

import numpy as np

from jaxserve.batch.samples import SeatTable
from jaxserve.batch.shape import shape_of
from jaxserve.batch.step import Batch, StepResult
from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel, no_step
from jaxserve.kv.groups import FULL, Windows
from jaxserve.scheduler.plan import Ints, Plan
from model_zoo.step_inputs import StepInputs

TOKEN = 0  # what every row samples
_NOTHING = np.zeros(0, np.int32)
_NO_INPUTS = StepInputs(*[_NOTHING] * len(StepInputs._fields))


class Clock:
    """Seconds of virtual time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ShapeBuilder:
    """Batches without arrays: a device that is not there reads only their shape.  Made as a
    `BatchBuilder` is, and their shapes are the same."""

    def __init__(
        self, config: EngineConfig, tables: Ints, vocab_size: int, windows: Windows = FULL
    ) -> None:
        self._rows = config.buckets.rows
        self._seat_table = SeatTable(config, vocab_size)
        self._empty = no_step(windows)

    def build(self, plan: Plan) -> Batch:
        for request in plan.admitted:
            self._seat_table.sit(request)
        seats = plan.decodes.seats
        ended = [chunk.request.seat for chunk in plan.chunks if chunk.samples]
        if ended:
            seats = np.concatenate([seats, np.array(ended, np.int32)])
        rows, sampler = 0, "none"
        if len(seats):
            rows = self._rows[bisect.bisect_left(self._rows, len(seats))]
            sampler = self._seat_table.sampler(seats)
        return Batch(
            packed=_NOTHING,
            inputs=_NO_INPUTS,
            num_tokens=plan.num_tokens,
            num_samples=len(seats),
            sampler=sampler,
            samples=None,
            logprobs=False,
            scores=(),
            resets=(),
            shape=shape_of(plan, rows, sampler, self._empty),
        )


class VirtualRunner:
    """The engine's runner in virtual time: steps run one after the other, as on a device.

    A dispatch costs the host time of the model; with overlap the device works meanwhile.
    """

    def __init__(self, clock: Clock, model: CostModel) -> None:
        self._clock, self._model = clock, model
        self._free_at = 0.0  # when the device has nothing more to do

    def dispatch(self, batch: Batch) -> tuple[StepResult, float]:
        shape = batch.shape
        self._clock.now += self._model.host_s(shape.singles + shape.chunks)
        seconds = self._model.predict(shape)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        tokens = np.full(shape.rows, TOKEN, np.int32)
        bad = np.zeros(shape.rows, np.bool_)
        return StepResult(tokens, bad, None, (), seconds), self._free_at

    def result(self, handle: tuple[StepResult, float]) -> StepResult:
        result, done = handle
        self._clock.now = max(self._clock.now, done)
        return result
