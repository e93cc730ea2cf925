"""Mode time, what is remembered between steps: by seat, when the tokens of a request are due."""

import math
from collections.abc import Sequence

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.costs import NO_STEP, OnlineCosts
from jaxserve.request import Request
from jaxserve.scheduler import time_budget
from jaxserve.scheduler.plan import Decodes, Ints
from jaxserve.scheduler.time_budget import Decoders, Price, Prompt, StepTime

FRONT = 16  # waiting requests that are looked at
SAMPLERS = ("greedy", "random", "full")


class Pacing:
    """`begin` is always when a step is expected to begin on the device; the engine's clock.

    `held` bool[seats]: decodes that wait in this step; nobody does for `aging_steps` steps.
    """

    def __init__(self, config: EngineConfig) -> None:
        seats = config.scheduler.max_seqs
        self.held = np.zeros(seats, np.bool_)
        self._margin = config.slo.margin
        self._aging_steps = config.scheduler.aging_steps
        self._sizes, self._rows = config.buckets.tokens, config.buckets.rows
        self._anchor = np.full(seats, math.inf)
        self._tpot = np.full(seats, math.inf)
        self._prompt = np.zeros(seats, np.int32)
        self._last = np.zeros(seats)  # when its last token came, or is to come
        self._waited = np.zeros(seats, np.int32)  # steps in a row
        self._level = np.zeros(seats, np.int8)  # of SAMPLERS

    def sit(self, request: Request) -> None:
        """`request` has taken its seat."""
        seat, asked = request.seat, request.sampling
        self._anchor[seat], self._tpot[seat] = request.anchor, request.tpot_s
        self._prompt[seat] = request.num_prompt
        self._waited[seat] = 0
        self._level[seat] = 2 if asked.needs_full else int(not asked.is_greedy)

    def decide(
        self, begin: float, decodes: Decodes, prompts: Sequence[Request], costs: OnlineCosts
    ) -> float:
        """Sets `held`; returns when the step should be over.  `prompts` in their order."""
        seats = decodes.seats
        sampler = SAMPLERS[int(self._level[seats].max(initial=0))]
        price = Price(costs.predict, self._sizes, self._rows, sampler)
        done = decodes.starts + 1 - self._prompt[seats]
        with np.errstate(invalid="ignore"):
            due = self._anchor[seats] + done * self._tpot[seats]
        decoders = Decoders(
            self._kept(begin, due), self._kept(begin, self._last[seats] + self._tpot[seats]), decodes.starts + 1
        )
        known = [
            Prompt(begin + (r.due - begin) * (1 - self._margin), r.num_computed, r.num_pending)
            for r in prompts
        ]
        pace = time_budget.decide(begin, decoders, known, price)
        ...
