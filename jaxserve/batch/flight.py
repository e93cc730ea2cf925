"""A step on its way to the device and back."""

import dataclasses
from typing import Any

from jaxserve.batch.step import Batch
from jaxserve.scheduler.plan import Chunk, Plan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A dispatched step; numbers are those of the moment it was planned."""

    plan: Plan
    batch: Batch
    handle: Any
    targets: list[tuple[Chunk, list[int]]]  # prompt tokens it scores
    planned_at: float  # the engine's clock
    predicted_s: float | None  # None until costs are measured
    query_tokens: int  # prompts of requests that are new in the step
    schedule_s: float
    build_s: float
    dispatch_s: float  # of this thread's CPU
    queue_s: float  # that the dispatch stood still: the device takes so many calls at a time
    waiting: int
    running: int
    kv_used: int
    kv_blocks: int
