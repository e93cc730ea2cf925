"""A step on its way to the device and back, and the record it leaves."""

import dataclasses
from typing import Any

from jaxserve.batch.step import Batch
from jaxserve.metrics import StepRecord
from jaxserve.scheduler.plan import Chunk, Plan
from jaxserve.scheduler.snap import CostTable


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A dispatched step; numbers are those of the moment it was planned."""

    plan: Plan
    batch: Batch
    handle: Any
    targets: list[tuple[Chunk, list[int]]]  # prompt tokens it scores
    schedule_s: float
    build_s: float
    dispatch_s: float
    waiting: int
    running: int
    kv_used: int
    kv_blocks: int

    def record(
        self,
        *,
        step: int,
        costs: CostTable,
        device_s: float,
        output_tokens: int,
        wait_s: float,
        update_s: float,
    ) -> StepRecord:
        """What is known once the step has returned; times in seconds."""
        plan, batch = self.plan, self.batch
        return StepRecord(
            step=step,
            bucket=plan.bucket,
            rows=plan.decode_tokens + len(plan.chunks),
            sampler=batch.sampler,
            decode_tokens=plan.decode_tokens,
            prefill_tokens=plan.num_tokens - plan.decode_tokens - plan.recomputed_tokens,
            recomputed_tokens=plan.recomputed_tokens,
            padded_tokens=plan.bucket - plan.num_tokens,
            output_tokens=output_tokens,
            dropped_tokens=batch.num_samples - output_tokens,
            unused=None if plan.unused is None else str(plan.unused),
            predicted_s=costs.cost(plan.num_tokens) if costs.measured else None,
            device_s=device_s,
            padding_s=device_s * costs.padding_share(plan.num_tokens),
            schedule_s=self.schedule_s,
            build_s=self.build_s,
            dispatch_s=self.dispatch_s,
            wait_s=wait_s,
            update_s=update_s,
            waiting=self.waiting,
            running=self.running,
            kv_used=self.kv_used,
            kv_blocks=self.kv_blocks,
            preemptions=len(plan.preempted),
            hit_tokens=plan.hit_tokens,
            resume_hit_tokens=plan.resume_hit_tokens,
        )
