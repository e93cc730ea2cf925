"""A batch job: reads ahead, keeps the engine full, writes each result as it finishes."""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.driver import Driver, Generation
from jaxserve.engine import QueueFull
from jaxserve.interrupts import Uninterrupted
from jaxserve.offline import results
from jaxserve.offline.jsonl import LineError, shorten
from jaxserve.offline.progress import Progress
from jaxserve.offline.reader import Failed, Reader, Ready
from jaxserve.offline.tasks import Task
from jaxserve.offline.writer import Writer
from jaxserve.request import SamplingParams
from jaxserve.text.chat import render_chat

if TYPE_CHECKING:
    from jaxserve.build import Assembly

WINDOW_SEATS = 4  # samples in flight, in multiples of max_seqs: the scheduler has a choice
_ENDINGS = re.compile(r"([.-](i?q\d\w*|bf16|f16|f32))?(\.gguf)?$")
MAX_FAILED_STEPS = 3  # in a row, and a job ends


class EngineBroken(RuntimeError):
    """No step succeeds any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobOptions:
    """What a job does with its lines."""

    defaults: SamplingParams = SamplingParams()  # for what a line does not say
    token_ids: bool = False  # every result names its token ids
    any_model: bool = False  # lines may ask for another model; they get this one


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
    """One run over one input file."""

    def __init__(self, assembly: "Assembly", options: JobOptions, totals: Totals) -> None:
        """`totals` is kept up to date while the job runs, so it holds after an interruption too."""
        self._engine = assembly.engine
        self._driver = Driver(assembly.engine, assembly.tokenizer)
        self._tokenizer = assembly.tokenizer
        self._config = assembly.config
        self._options = options
        self._totals = totals
        self._names = {"default", short_name(assembly.config.model.name)}
        scheduler = assembly.config.scheduler
        self._window = min(WINDOW_SEATS * scheduler.max_seqs, scheduler.max_waiting)
        self._lines: dict[Generation, Ready] = {}
        self._waiting: Ready | Failed | None = None  # taken from the reader, refused by the queue
        self._tokens_seen = 0
        self._steps_seen = assembly.engine.stats.steps
        self._failures_seen = assembly.engine.stats.failed_steps

    def run(self, input_path: Path, writer: Writer, progress: Progress) -> None:
        """Every line gets one result.

        Raises OSError when a file fails and EngineBroken when no step succeeds any more; what was
        in flight then has no result, and the driver is not to be used again.
        """
        reader = Reader(input_path, self._options.defaults, self._encode)
        try:
            while self._fill(reader, writer) or self._lines:
                if self._lines:
                    self._step(writer)
                totals = self._totals
                progress.update(done=totals.done, failed=totals.failed, tokens=self._tokens_seen)
        finally:
            reader.stop()

    def _fill(self, reader: Reader, writer: Writer) -> bool:
        """Takes lines until the window is full or none is ready; False at the end of the input.

        Waits for a line only when the engine has nothing else to do.
        """
        while self._driver.num_running < self._window:
            item = self._waiting or reader.take(wait=not self._lines)
            self._waiting = None
            if item is None:
                return not reader.ended
            if isinstance(item, Failed):
                self._fail(writer, item)
                if not self._lines:
                    break  # so that progress shows even when every line fails
            elif not self._submit(item, writer):
                break
        return True

    def _submit(self, line: Ready, writer: Writer) -> bool:
        """False when the queue has no place: the line waits."""
        task = line.task
        try:
            with Uninterrupted():
                prompt, sampling = line.prompt, task.sampling
                generation = self._driver.submit(prompt, sampling, priority=task.priority)
                self._lines[generation] = line
        except QueueFull:
            if not self._lines:
                message = f"n={task.sampling.n} is more than scheduler.max_waiting allows"
                self._fail(writer, Failed(line.number, line.custom_id, _invalid(message)))
                return True
            self._waiting = line
            return False
        except ValueError as error:
            self._fail(writer, Failed(line.number, line.custom_id, _invalid(str(error))))
        return True

    def _step(self, writer: Writer) -> None:
        """One step, and the results of what it finished; Ctrl-C waits until they are written."""
        with Uninterrupted():
            for generation, chunk in self._driver.step():
                self._tokens_seen += len(chunk.token_ids)
                if generation.done and generation in self._lines:
                    self._finish(generation, writer)
        self._stop_if_broken()

    def _stop_if_broken(self) -> None:
        """An engine whose steps all fail would turn the whole input into error results."""
        stats = self._engine.stats
        if stats.steps > self._steps_seen:
            self._steps_seen, self._failures_seen = stats.steps, stats.failed_steps
        if stats.failed_steps - self._failures_seen >= MAX_FAILED_STEPS:
            raise EngineBroken(f"{MAX_FAILED_STEPS} steps in a row failed; the job was stopped")

    def _finish(self, generation: Generation, writer: Writer) -> None:
        line = self._lines.pop(generation)
        completion = generation.completion()
        usage, totals = completion.usage, self._totals
        totals.prompt_tokens += usage.prompt_tokens
        totals.cached_tokens += usage.cached_tokens
        totals.output_tokens += usage.completion_tokens
        broken = [sample for sample in completion.outputs if sample.finish_reason == "error"]
        if broken:
            error = LineError("generation_error", broken[0].error or "generation failed")
            self._fail(writer, Failed(line.number, line.custom_id, error), status=500)
            return
        body = results.body(
            completion,
            self._tokenizer,
            model=self._config.model.name,
            number=line.number,
            is_chat=line.task.is_chat,
            token_ids=self._options.token_ids or line.task.return_token_ids,
        )
        writer.write(results.success(line.number, line.custom_id, body))
        totals.done += 1
        totals.finish_reasons.update(sample.finish_reason for sample in completion.outputs)

    def _fail(self, writer: Writer, line: Failed, status: int = 400) -> None:
        writer.write(results.failure(line.number, line.custom_id, line.error, status))
        self._totals.failed += 1

    def _encode(self, task: Task) -> list[int]:
        """Runs in the reader's thread."""
        served = self._config.model
        if task.model is not None and not self._options.any_model:
            if short_name(task.model) not in self._names:
                message = f"this job runs {served.name}, not {shorten(task.model)}"
                raise LineError("unknown_model", message)
        if task.messages is not None:
            ids = render_chat(self._tokenizer, task.messages)
        elif task.text is not None:
            ids = self._tokenizer.encode(task.text)
        else:
            ids = task.token_ids or []
        if len(ids) > served.max_len:
            message = f"the prompt has {len(ids)} tokens; model.max_len is {served.max_len}"
            raise LineError("prompt_too_long", message)
        return ids


def short_name(name: str) -> str:
    """What is left of a model's name, hub name or path when folders, the ending of a GGUF file and
    its quantisation are taken away; in lower case."""
    return _ENDINGS.sub("", name.lower().rstrip("/").rpartition("/")[2])


def _invalid(message: str) -> LineError:
    return LineError("invalid_request", message)
