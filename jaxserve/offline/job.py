"""A batch job: takes lines from a source, keeps the engine full, hands results to a sink.

Knows no files: the same loop runs over a local file, inside a Ray actor, and in tests.
"""

import dataclasses
import enum
import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from jaxserve.driver import Driver, Generation
from jaxserve.engine import QueueFull
from jaxserve.interrupts import Uninterrupted
from jaxserve.offline import results
from jaxserve.offline.jsonl import Place
from jaxserve.offline.lookahead import LookAhead
from jaxserve.offline.parse import Failed, Ready
from jaxserve.offline.progress import Progress, Snapshot
from jaxserve.offline.report import EngineUse
from jaxserve.openai_api import answers
from jaxserve.openai_api.errors import RequestError
from jaxserve.request import SamplingParams

if TYPE_CHECKING:
    from jaxserve.build import Assembly

WINDOW_SEATS = 4  # samples in flight at most, in multiples of max_seqs
QUEUED_SEATS = 1  # samples queued for seats, likewise: enough for every step, no more than that
MAX_FAILED_STEPS = 3  # in a row, and a job ends


class JobFailed(RuntimeError):
    """Going on makes no sense.  What was in flight has no result; what the sink has, holds."""


class Outcome(enum.IntEnum):
    """How a line ended."""

    DONE = 0
    FAILED = 1  # and would fail again
    RETRYABLE = 2  # failed for a reason that lies outside the line


class Source(Protocol):
    """Where lines come from."""

    @property
    def ended(self) -> bool:
        """Every line was taken."""
        ...

    def take(self, *, wait: bool) -> Ready | Failed | None:
        """The next line; None at the end, or when none is ready yet.  With `wait` it may block for
        a moment, never for long."""
        ...


class Sink(Protocol):
    """Where results go."""

    def write(self, place: Place, outcome: Outcome, result: bytes) -> None:
        """One result: a JSON object without a line end."""
        ...

    def flush(self) -> None:
        """Called after every step: what was written should become visible, and durable when it is
        time."""
        ...


class Stop(Protocol):
    """Tells a job to end early."""

    @property
    def asked(self) -> bool:
        """No more lines are taken; those in flight go on."""
        ...

    @property
    def expired(self) -> bool:
        """What is still in flight is given up: it has no result."""
        ...


class Never:
    """The Stop of a job that runs to its end."""

    asked = False
    expired = False


@dataclasses.dataclass(frozen=True, slots=True)
class JobOptions:
    """What a job does with its lines."""

    token_ids: bool = False  # every result names its token ids
    in_order: bool = False  # lines start in the order of the input
    max_errors: int | None = None  # more failed lines than this end the job


@dataclasses.dataclass(slots=True)
class Totals:
    """What a job did so far."""

    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: Counter[str] = dataclasses.field(default_factory=Counter[str])

    def report(self, seconds: float) -> dict[str, Any]:
        """The figures of the summary; `seconds` the job took without the start of the engine."""
        total = self.prompt_tokens + self.output_tokens
        return {
            "done": self.done,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "wall_s": seconds,
            "output_tokens_per_s": self.output_tokens / seconds if seconds else 0.0,
            "total_tokens_per_s": total / seconds if seconds else 0.0,
            "finish_reasons": dict(self.finish_reasons),
        }


class Job:
    """One run from a source to a sink."""

    def __init__(self, assembly: "Assembly", options: JobOptions) -> None:
        self.totals = Totals()  # kept up to date, so they hold after an interruption too
        self._engine = assembly.engine
        self._driver = Driver(assembly.engine, assembly.tokenizer)
        self._tokenizer = assembly.tokenizer
        self._config = assembly.config
        self._options = options
        scheduler = assembly.config.scheduler
        self._window = min(WINDOW_SEATS * scheduler.max_seqs, scheduler.max_waiting)
        self._queued = min(QUEUED_SEATS * scheduler.max_seqs, scheduler.max_waiting)
        self._lines: dict[Generation, Ready] = {}
        self._waiting: Ready | Failed | None = None  # taken from the source, refused by the queue
        self._tokens_seen = 0
        self._before = EngineUse.of(assembly.engine.stats)
        self._steps_seen = assembly.engine.stats.steps
        self._failures_seen = assembly.engine.stats.failed_steps

    def run(self, source: Source, sink: Sink, progress: Progress, stop: Stop | None = None) -> None:
        """Every line gets one result, unless `stop` asks for an early end.

        Raises JobFailed when no step succeeds any more or too many lines failed, and what source
        and sink raise; what was in flight then has no result, and the driver is not to be used
        again.
        """
        stop = stop or Never()
        windows = self._engine.limits.windows
        lines = LookAhead(source, self._config, windows, in_order=self._options.in_order)
        while self._fill(lines, sink, stop) or self._lines:
            if stop.expired:
                self._give_up()
                break
            if self._lines:
                self._step(lines, sink)
            sink.flush()
            progress.update(self.snapshot())

    def snapshot(self) -> Snapshot:
        """How far it is."""
        kv = self._engine.kv
        return Snapshot(
            done=self.totals.done,
            failed=self.totals.failed,
            tokens=self._tokens_seen,
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            kv_used=kv.num_used / kv.num_blocks,
        )

    @property
    def use(self) -> EngineUse:
        """What this job made the engine do so far."""
        return EngineUse.of(self._engine.stats).since(self._before)

    def _fill(self, source: LookAhead, sink: Sink, stop: Stop) -> bool:
        """Takes lines until the window is full or none is ready, and at most as many as the window
        holds; False when no more are to come.  Ctrl-C waits for its end.

        Waits for a line only when the engine has nothing else to do.
        """
        with Uninterrupted():
            for _ in range(self._window):
                waiting = self._engine.num_waiting
                if waiting >= self._queued or self._driver.num_running >= self._window:
                    break
                if stop.asked:
                    return False
                item = self._waiting or source.take(wait=not self._lines, patient=waiting > 0)
                self._waiting = None
                if item is None:
                    return not source.ended
                if isinstance(item, Failed):
                    self._fail(sink, item)
                    if not self._lines:
                        break  # so that progress shows even when every line fails
                elif not self._submit(item, source, sink):
                    break
        return True

    def _submit(self, line: Ready, source: LookAhead, sink: Sink) -> bool:
        """False when the queue has no place: the line waits."""
        task = line.task
        try:
            generation = self._driver.submit(
                line.prompt, self._seeded(line), priority=task.priority, salt=task.salt
            )
            self._lines[generation] = line
        except QueueFull:
            if not self._lines:
                message = f"n={task.sampling.n} is more than scheduler.max_waiting allows"
                source.computed(line)
                self._fail(sink, Failed(line.place, line.custom_id, _invalid(message)))
                return True
            self._waiting = line
            return False
        except ValueError as error:
            source.computed(line)
            self._fail(sink, Failed(line.place, line.custom_id, _invalid(str(error))))
        return True

    def _seeded(self, line: Ready) -> SamplingParams:
        """A line that names no seed gets one from its place, so that its text depends neither on
        the order of the job nor on which run, shard or worker it falls to."""
        sampling = line.task.sampling
        if sampling.seed is not None or sampling.is_greedy:
            return sampling
        return sampling.with_seed(line_seed(self._config.sampling.seed, line.place))

    def _step(self, lines: LookAhead, sink: Sink) -> None:
        """One step, and the results of what it finished; Ctrl-C waits until they are written."""
        with Uninterrupted():
            for generation, chunk in self._driver.step():
                self._tokens_seen += len(chunk.token_ids)
                line = self._lines.get(generation)
                if line is not None:
                    lines.computed(line)
                    if generation.done:
                        self._finish(generation, sink)
        self._stop_if_broken()

    def _stop_if_broken(self) -> None:
        """An engine whose steps all fail would turn the whole input into error results."""
        stats = self._engine.stats
        if stats.steps > self._steps_seen:
            self._steps_seen, self._failures_seen = stats.steps, stats.failed_steps
        if stats.failed_steps - self._failures_seen >= MAX_FAILED_STEPS:
            raise JobFailed(f"{MAX_FAILED_STEPS} steps in a row failed; the job was stopped")

    def _finish(self, generation: Generation, sink: Sink) -> None:
        line = self._lines.pop(generation)
        completion = generation.completion()
        usage, totals = completion.usage, self.totals
        totals.prompt_tokens += usage.prompt_tokens
        totals.cached_tokens += usage.cached_tokens
        totals.output_tokens += usage.completion_tokens
        broken = [sample for sample in completion.outputs if sample.finish_reason == "error"]
        if broken:
            error = RequestError("generation_error", broken[0].error or "generation failed")
            self._fail(sink, Failed(line.place, line.custom_id, error), status=500)
            return
        body = answers.body(
            [completion],
            self._tokenizer,
            model=self._config.model.name,
            name=str(line.place.number),
            is_chat=line.task.is_chat,
            token_ids=self._options.token_ids or line.task.return_token_ids,
        )
        result = results.success(line.place, line.custom_id, body)
        sink.write(line.place, Outcome.DONE, msgspec.json.encode(result))
        totals.done += 1
        for sample in completion.outputs:
            totals.finish_reasons[sample.finish_reason] += 1

    def _fail(self, sink: Sink, line: Failed, status: int = 400) -> None:
        result = results.failure(line.place, line.custom_id, line.error, status)
        outcome = Outcome.FAILED if status < 500 else Outcome.RETRYABLE
        sink.write(line.place, outcome, msgspec.json.encode(result))
        self.totals.failed += 1
        limit = self._options.max_errors
        if limit is not None and self.totals.failed > limit:
            raise JobFailed(f"more than {limit} lines failed, the last: {line.place}: {line.error}")

    def _give_up(self) -> None:
        with Uninterrupted():
            self._driver.abort_all()
            self._lines.clear()


def line_seed(base: int, place: Place) -> int:
    """64 bits from the engine's base seed and the place of a line in the job's whole input."""
    digest = hashlib.blake2b(f"{base} {place.index}".encode(), digest_size=8)
    return int.from_bytes(digest.digest())


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_request", message)
