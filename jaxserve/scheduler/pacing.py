"""Mode time, what is remembered between steps: by seat, when the tokens of a request are due."""

import math
from collections.abc import Sequence

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.costs import OnlineCosts, StepShape
from jaxserve.request import SAMPLERS, Request
from jaxserve.scheduler import time_budget
from jaxserve.scheduler.plan import Bools, Chunk, Decodes
from jaxserve.scheduler.time_budget import Decoders, Floats, Price, Prompt, StepTime

FRONT = 16  # waiting requests that are looked at


class Pacing:
    """`begin` is always when a step is expected to begin on the device; the engine's clock.
    A decode waits for at most `aging_steps` steps in a row.  `empty`: as in `Price`.
    """

    def __init__(self, config: EngineConfig, empty: StepShape) -> None:
        seats = config.scheduler.max_seqs
        self._margin = config.slo.margin
        self._aging_steps = config.scheduler.aging_steps
        self._sizes, self._rows = config.buckets.tokens, config.buckets.rows
        self._empty = empty
        self._anchor = np.full(seats, math.inf)
        self._tpot = np.full(seats, math.inf)
        self._prompt = np.zeros(seats, np.int32)
        self._last = np.zeros(seats)  # when its last token came, or is to come
        self._waited = np.zeros(seats, np.int32)  # steps in a row
        self._level = np.zeros(seats, np.int8)  # of SAMPLERS

    def sit(self, request: Request) -> None:
        """`request` has taken its seat."""
        seat = request.seat
        self._anchor[seat], self._tpot[seat] = request.anchor, request.tpot_s
        self._prompt[seat] = request.num_prompt
        self._waited[seat] = 0
        self._level[seat] = request.sampling.sampler

    def decide(
        self, begin: float, decodes: Decodes, prompts: Sequence[Request], costs: OnlineCosts
    ) -> tuple[StepTime, Bools | None]:
        """What fits beside the decodes that run, and which wait, bool[seats].  `prompts` in their
        order."""
        seats, contexts = decodes.seats, decodes.starts + 1
        sampler = SAMPLERS[int(self._level[seats].max(initial=0))]
        price = Price(costs.predict, self._sizes, self._rows, sampler, self._empty)
        done = (contexts - self._prompt[seats]).astype(np.float64)
        due = self._anchor[seats] + done * self._tpot[seats]
        gap_due = self._last[seats] + self._tpot[seats]
        decoders = Decoders(self._early(begin, due), self._early(begin, gap_due), contexts)
        dues = self._early(begin, np.array([request.due for request in prompts])).tolist()
        known = [
            Prompt(end, request.num_computed, request.num_pending)
            for end, request in zip(dues, prompts, strict=True)
        ]
        pace = time_budget.decide(begin, decoders, known, price)
        waits = np.zeros(len(seats), np.bool_)
        waits[list(pace.held)] = True
        waits &= self._waited[seats] < self._aging_steps
        time = StepTime(price, self._empty.with_singles(contexts[~waits]), pace.end - begin)
        if not waits.any():
            return time, None
        held = np.zeros(len(self._last), np.bool_)
        held[seats] = waits
        self._waited[held] += 1
        return time, held

    def went(self, end: float, decodes: Decodes, chunks: Sequence[Chunk]) -> None:
        """A step of these is to be over at `end`."""
        self._last[decodes.seats] = end
        self._waited[decodes.seats] = 0
        for chunk in chunks:
            if chunk.samples:
                request, seat = chunk.request, chunk.request.seat
                self._last[seat] = end
                if request.ttft_s == math.inf and not request.output:
                    request.anchor = self._anchor[seat] = end

    def _early(self, begin: float, due: Floats) -> Floats:
        """Deadlines with the margin taken off their distance."""
        return np.where(due > begin, begin + (due - begin) * (1 - self._margin), due)
