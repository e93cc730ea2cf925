"""A device that is not there: its steps take the time that a cost model predicts, on a clock that
is moved and never waited for."""

import numpy as np

from jaxserve.batch.step import Batch, StepResult
from jaxserve.costs import CostModel
from jaxserve.engine import shape_of

TOKEN = 0  # what every row samples


class Clock:
    """Seconds of virtual time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualRunner:
    """The engine's runner in virtual time: steps run one after the other, as on a device.

    A dispatch costs the host time of the model; with overlap the device works meanwhile.
    """

    def __init__(self, clock: Clock, model: CostModel) -> None:
        self._clock, self._model = clock, model
        self._free_at = 0.0  # when the device has nothing more to do

    def dispatch(self, batch: Batch) -> tuple[StepResult, float]:
        shape = shape_of(batch)
        self._clock.now += self._model.host_s(shape.singles + shape.chunks)
        seconds = self._model.predict(shape)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        tokens = np.full(batch.row_bucket, TOKEN, np.int32)
        bad = np.zeros(batch.row_bucket, np.bool_)
        return StepResult(tokens, bad, None, (), seconds), self._free_at

    def result(self, handle: tuple[StepResult, float]) -> StepResult:
        result, done = handle
        self._clock.now = max(self._clock.now, done)
        return result
