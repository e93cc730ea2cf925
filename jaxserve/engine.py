"""The loop: schedule, build, dispatch, read the step before, update.

With overlap, step N + 1 is scheduled and dispatched before step N is read: JAX runs steps in the
order of their dispatch, and a token that only the device knows goes from step to step there.  What
the host learns one step late (an end, a cancel) costs one discarded token: results carry an epoch.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxserve.batch.builder import BatchBuilder
from jaxserve.batch.flight import Flight
from jaxserve.batch.logprobs import PromptScores, attach, scored_targets
from jaxserve.batch.step import Batch, StepResult
from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel, OnlineCosts
from jaxserve.kv.groups import Windows
from jaxserve.kv.manager import KVManager
from jaxserve.metrics import StepRecord, Totals
from jaxserve.request import Output, Request, SamplingParams, Status
from jaxserve.scheduler import admission
from jaxserve.scheduler.admission import ModelLimits, QueueFull
from jaxserve.scheduler.plan import Ints, Plan
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.snap import CostTable

__all__ = ["Engine", "ModelLimits", "Observer", "QueueFull", "Runner"]

_log = logging.getLogger(__name__)


class Builder(Protocol):
    """Turns plans into what the runner takes."""

    def build(self, plan: Plan) -> Batch:
        """The step of a plan with at least one chunk."""
        ...


class Runner(Protocol):
    """The device half, or what stands in for it."""

    def dispatch(self, batch: Batch) -> Any:
        """Starts the step and returns a handle without waiting; steps run in this order."""
        ...

    def result(self, handle: Any) -> StepResult:
        """Blocks until the step is done."""
        ...


class Observer(Protocol):
    """Hears what happens, in the thread that steps; it must change nothing (`lab.record`)."""

    def arrived(self, requests: Sequence[Request]) -> None:
        """They wait from now on."""
        ...

    def landed(self, flight: Flight, record: StepRecord, outputs: Sequence[Output]) -> None:
        """A step has returned."""
        ...

    def ended(self, request: Request) -> None:
        """A request ended outside of a step: cancelled, a stop string, a step that failed."""
        ...


class Engine:
    """`config` is resolved (`jaxserve.batch.buckets.resolve`).  `on_step` gets every step's record.

    `observer` may be set at any time.  Not thread-safe: one thread calls it.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        limits: ModelLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[StepRecord], None] | None = None,
        make_builder: Callable[[EngineConfig, Ints, int, Windows], Builder] = BatchBuilder,
    ) -> None:
        self.config = config
        self.stats = Totals()
        self.observer: Observer | None = None
        self.limits = limits
        self._runner = runner
        self._clock = clock
        self._on_step = on_step
        rules, block_size = config.scheduler, config.cache.block_size
        self.kv = KVManager(
            num_blocks=config.cache.num_blocks,
            block_size=block_size,
            seats=rules.max_seqs,
            blocks_per_row=-(-config.model.max_len // block_size),
            prefix_caching=config.cache.prefix_caching,
            identity=f"{config.model.name}|{config.model.dtype}",
            hit_blocks=rules.chunk_size // block_size if config.runner.deterministic else 1,
            windows=limits.windows,
            max_chunk=config.max_chunk,
        )
        self.scheduler = Scheduler(config, self.kv)
        self._builder = make_builder(config, self.kv.tables, limits.vocab_size, limits.windows)
        self._prompts = PromptScores()
        self._followers: dict[Request, list[Request]] = {}  # of a first sample: the other ones
        self._num_followers = 0
        self._flight: Flight | None = None
        self._number = 0
        self._costs: OnlineCosts | None = None
        self._follow = False
        self._busy_until = 0.0  # when the device should have done all that was dispatched

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.num_waiting or self._flight)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting + self._num_followers

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def set_costs(self, model: CostModel, *, follow: bool = True) -> None:
        """Measured costs, for snapping and predictions.  `follow`: correct them by what steps take;
        never where several processes must schedule alike."""
        self._costs, self._follow = OnlineCosts(model), follow
        self.scheduler.set_costs(self._costs)

    @property
    def cost_model(self) -> CostModel | None:
        """As it was measured; None until it was."""
        return None if self._costs is None else self._costs.model

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
    ) -> list[Request]:
        """Queues the `n` samples of one prompt: all of them, or none and an exception.

        Raises ValueError, saying why, for what can never run here, and QueueFull.  A request ends
        with reason "length" at max_tokens, at the model's length, and where the KV pool ends.
        With prefix caching, samples after the first wait until it has computed the prompt.
        """
        tokens = admission.check(self.config, self.limits, prompt, sampling)
        admission.check_labels(priority, salt)
        most = self.config.scheduler.max_waiting
        if self.num_waiting + sampling.n > most:
            raise QueueFull(f"{self.num_waiting} requests wait already; at most {most} may")
        first_number = self._number
        self._number += sampling.n
        requests = [
            admission.new_request(
                self.config,
                self.limits,
                tokens,
                sampling,
                number=first_number + sample,
                sample=sample,
            )
            for sample in range(sampling.n)
        ]
        now = self._clock()
        for request in requests:
            request.priority, request.salt, request.arrival = priority, salt, now
            request.anchor = now + request.ttft_s
        leaders = 1 if self.config.cache.prefix_caching else sampling.n
        for request in requests[:leaders]:
            self.scheduler.add(request)
        if requests[leaders:]:
            self._followers[requests[0]] = requests[leaders:]
            self._num_followers += len(requests[leaders:])
        if self.observer is not None:
            self.observer.arrived(requests)
        return requests

    def finish(self, request: Request, reason: str = "stop") -> None:
        """Ends a request from outside: a stop string was found, or "abort".  Its blocks are free at
        once, a late result is ignored, and no output follows.  Idempotent."""
        if request.status is Status.WAITING and request.last_step < 0:  # it follows a first sample
            self._num_followers -= 1
        ends = request.status is not Status.FINISHED
        self.scheduler.finish(request, reason)
        self._prompts.drop(request)
        self._release_followers(request)
        if ends and self.observer is not None:
            self.observer.ended(request)

    def step(self) -> list[Output]:
        """Dispatches a step if there is anything to run, and returns what one step brought.

        With overlap that is the step dispatched by the call before.  A runner that raises leaves
        the KV array undefined: every request with a seat then ends with reason "error" and the
        prefix cache is dropped; waiting requests are untouched and the engine stays usable.
        """
        try:
            flight = self._launch()
            if self.config.runner.overlap:
                flight, self._flight = self._flight, flight
            return self._land(flight) if flight else []
        except Exception as error:
            _log.exception("a step failed")
            return self._fail_running(error)

    def _launch(self) -> Flight | None:
        """Plans, builds and dispatches a step; None when there is nothing to run."""
        began, planned_at = time.perf_counter(), self._clock()
        waiting, running = self.num_waiting, self.num_running
        begin = max(planned_at, self._busy_until)
        plan = self.scheduler.schedule(begin)
        scheduled = time.perf_counter()
        for request in plan.preempted:
            self._prompts.drop(request)
        if not plan.num_tokens:
            if self._flight is None and self.has_work:
                raise RuntimeError(f"no request can run: {running} running, {waiting} waiting")
            return None
        query_tokens = self._note_prefills(plan)
        targets = [(c, scored_targets(c)) for c in plan.chunks] if len(self._prompts) else []
        batch = self._builder.build(plan)
        predicted = None if self._costs is None else self._costs.predict(batch.shape)
        self._busy_until = begin + (predicted or 0.0)
        built, busy = time.perf_counter(), time.thread_time()
        handle = self._runner.dispatch(batch)
        dispatch_s = time.thread_time() - busy
        return Flight(
            plan=plan,
            batch=batch,
            handle=handle,
            targets=targets,
            planned_at=planned_at,
            predicted_s=predicted,
            query_tokens=query_tokens,
            schedule_s=scheduled - began,
            build_s=built - scheduled,
            dispatch_s=dispatch_s,
            queue_s=max(0.0, time.perf_counter() - built - dispatch_s),
            waiting=waiting,
            running=running,
            kv_used=self.kv.num_used,
            kv_blocks=self.kv.num_blocks,
        )

    def _note_prefills(self, plan: Plan) -> int:
        """What requests know of their prefill; prompt tokens of those that are new."""
        query_tokens = 0
        for request in plan.admitted:
            self._prompts.start(request)
            if request.admitted < 0:
                request.admitted = self._clock()
                query_tokens += request.num_prompt
        for chunk in plan.chunks:
            chunk.request.num_chunks += 1
        return query_tokens

    def _land(self, flight: Flight) -> list[Output]:
        """Reads a step's result and hands it to the requests it still belongs to."""
        began = time.perf_counter()
        result = self._runner.result(flight.handle)
        arrived, landed_at = time.perf_counter(), self._clock()
        plan, batch = flight.plan, flight.batch
        behind = self._flight.predicted_s if self._flight is not None else None
        self._busy_until = landed_at + (behind or 0.0)
        if flight.targets:
            self._prompts.collect(flight.targets, result.scores)
        count = batch.num_samples
        outputs = self.scheduler.update(plan, result.tokens[:count], result.bad[:count])
        if batch.logprobs or len(self._prompts):
            rows = [*plan.decodes.requests, *(c.request for c in plan.chunks if c.samples)]
            attach(outputs, rows, result.logprobs, self._prompts)
        if self._followers:
            for request, start, num_tokens, _, _ in plan.chunks:
                if start + num_tokens >= request.num_prompt or request.finish_reason:
                    self._release_followers(request)
        if self._costs is not None and self._follow and flight.predicted_s is not None:
            self._costs.observe(batch.shape, flight.predicted_s, result.device_s)
        updated = time.perf_counter()
        record = _record(
            flight,
            step=self.stats.steps,
            landed_at=landed_at,
            costs=self.scheduler.costs,
            device_s=result.device_s,
            output_tokens=sum(len(output.tokens) for output in outputs),
            wait_s=flight.queue_s + arrived - began,
            update_s=updated - arrived,
        )
        self.stats.add(record)
        if self._on_step is not None:
            self._on_step(record)
        if self.observer is not None:
            self.observer.landed(flight, record, outputs)
        return outputs

    def _release_followers(self, request: Request) -> None:
        """Queues the samples that wait for `request`, which has computed the prompt or ended."""
        for follower in self._followers.pop(request, ()):
            if follower.status is Status.WAITING:
                self._num_followers -= 1
                self.scheduler.add(follower)

    def _fail_running(self, error: Exception) -> list[Output]:
        self.stats.failed_steps += 1
        self._flight = None
        outputs: list[Output] = []
        for request in list(self.scheduler.running):
            self.scheduler.finish(request, "error", f"{type(error).__name__}: {error}")
            self._release_followers(request)
            outputs.append(Output(request, (), finish_reason="error"))
            if self.observer is not None:
                self.observer.ended(request)
        self._prompts.clear()
        self.kv.forget_all()
        return outputs


def _record(  # noqa: PLR0913
    flight: Flight,
    *,
    step: int,
    landed_at: float,
    costs: CostTable,
    device_s: float,
    output_tokens: int,
    wait_s: float,
    update_s: float,
) -> StepRecord:
    """What is known once the step has returned; times in seconds."""
    plan, batch = flight.plan, flight.batch
    return StepRecord(
        step=step,
        planned_at=flight.planned_at,
        landed_at=landed_at,
        bucket=plan.bucket,
        rows=plan.decode_tokens + len(plan.chunks),
        sampler=batch.sampler,
        decode_tokens=plan.decode_tokens,
        prefill_tokens=plan.num_tokens - plan.decode_tokens - plan.recomputed_tokens,
        recomputed_tokens=plan.recomputed_tokens,
        padded_tokens=plan.bucket - plan.num_tokens,
        partial_prefills=sum(start + n < r.num_prompt for r, start, n, _, _ in plan.chunks),
        output_tokens=output_tokens,
        dropped_tokens=batch.num_samples - output_tokens,
        unused=None if plan.unused is None else str(plan.unused),
        shape=batch.shape,
        predicted_s=flight.predicted_s,
        device_s=device_s,
        padding_s=device_s * costs.padding_share(plan.num_tokens, flight.predicted_s),
        schedule_s=flight.schedule_s,
        build_s=flight.build_s,
        dispatch_s=flight.dispatch_s,
        wait_s=wait_s,
        update_s=update_s,
        waiting=flight.waiting,
        running=flight.running,
        kv_used=flight.kv_used,
        kv_blocks=flight.kv_blocks,
        preemptions=len(plan.preempted),
        query_tokens=flight.query_tokens,
        hit_tokens=plan.hit_tokens,
        resume_hit_tokens=plan.resume_hit_tokens,
    )
