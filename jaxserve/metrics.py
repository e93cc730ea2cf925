"""What every step did and cost, and the running totals.  Exporters read these values."""

import collections
import dataclasses

from jaxserve.costs import StepShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step that has returned.  Times in seconds; tokens are real ones unless named padded."""

    step: int
    planned_at: float  # the engine's clock, as the step was begun
    landed_at: float  # and as its result had arrived at the host
    bucket: int  # tokens of the compiled shape
    rows: int  # requests with tokens in the step
    sampler: str
    decode_tokens: int
    prefill_tokens: int  # without the recomputed ones
    recomputed_tokens: int  # computed before a preemption already
    padded_tokens: int  # of the bucket, without a real token
    partial_prefills: int  # prompts that a chunk of the step did not complete
    output_tokens: int  # new tokens handed out
    dropped_tokens: int  # sampled for requests that had ended or were preempted meanwhile
    unused: str | None  # why part of the budget was not used; None: it was used up
    shape: StepShape  # what its time depends on
    predicted_s: float | None  # by the cost model, when dispatched; None until costs are measured
    device_s: float
    padding_s: float  # part of device_s that padding cost, by the cost model
    schedule_s: float
    build_s: float
    dispatch_s: float  # handing the step to the runner, of its thread's CPU
    wait_s: float  # blocked: the device takes no more calls yet, or has no result
    update_s: float
    waiting: int  # requests without a seat, when the step was planned
    running: int
    kv_used: int  # blocks
    kv_blocks: int
    preemptions: int
    query_tokens: int  # prompts of requests admitted for the first time
    hit_tokens: int  # prefix hits of requests admitted for the first time
    resume_hit_tokens: int  # prefix hits of requests that resume: not a cache's merit


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over all steps since the start."""

    steps: int = 0
    failed_steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    padded_tokens: int = 0
    partial_prefills: int = 0
    output_tokens: int = 0
    dropped_tokens: int = 0
    preemptions: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    resume_hit_tokens: int = 0
    device_s: float = 0.0
    padding_s: float = 0.0
    schedule_s: float = 0.0
    build_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    unused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    buckets: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter[int])

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.decode_tokens += record.decode_tokens
        self.prefill_tokens += record.prefill_tokens
        self.recomputed_tokens += record.recomputed_tokens
        self.padded_tokens += record.padded_tokens
        self.partial_prefills += record.partial_prefills
        self.output_tokens += record.output_tokens
        self.dropped_tokens += record.dropped_tokens
        self.preemptions += record.preemptions
        self.query_tokens += record.query_tokens
        self.hit_tokens += record.hit_tokens
        self.resume_hit_tokens += record.resume_hit_tokens
        self.device_s += record.device_s
        self.padding_s += record.padding_s
        self.schedule_s += record.schedule_s
        self.build_s += record.build_s
        self.dispatch_s += record.dispatch_s
        self.wait_s += record.wait_s
        self.update_s += record.update_s
        self.unused[record.unused or "full"] += 1
        self.buckets[record.bucket] += 1
