"""Keeps an engine going and turns what its steps bring into text: the one loop behind `LLM`, batch
jobs and bench."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxserve.completion import Chunk, Completion, Sample, Timings, Usage
from jaxserve.request import Output, Request, SamplingParams, TokenLogprobs
from jaxserve.text.stream import TextStream
from jaxserve.text.tokenizer import Tokenizer


@dataclasses.dataclass(eq=False, slots=True)
class _Progress:
    """One sample while it runs."""

    request: Request
    stream: TextStream | None  # None: nobody wants text
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def sample(self) -> Sample:
        asked = self.request.sampling.logprobs is not None
        return Sample(
            index=self.request.sample,
            text="" if self.stream is None else self.stream.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "abort",
            logprobs=tuple(self.logprobs) if asked else None,
            error=self.request.error,
        )


@dataclasses.dataclass(eq=False, slots=True)
class Generation:
    """One prompt in flight, and its n samples."""

    prompt: tuple[int, ...]
    submitted: float  # seconds, the driver's clock
    samples: list[_Progress]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def done(self) -> bool:
        return self.finished is not None

    def completion(self) -> Completion:
        """The result; only once it is done."""
        if self.finished is None:
            raise RuntimeError("the generation still runs; step the driver until it is done")
        generated = sum(len(sample.token_ids) for sample in self.samples)
        first = self.first_token
        return Completion(
            prompt_token_ids=self.prompt,
            outputs=tuple(sample.sample() for sample in self.samples),
            prompt_logprobs=self.prompt_logprobs,
            usage=Usage(len(self.prompt), generated, self.samples[0].request.num_cached),
            timings=Timings(
                ttft_s=None if first is None else first - self.submitted,
                total_s=self.finished - self.submitted,
            ),
        )


class Event(NamedTuple):
    """What a step brought for one sample of one prompt."""

    generation: Generation
    chunk: Chunk


class AnyEngine(Protocol):
    """An `Engine`, in this process or in another."""

    @property
    def has_work(self) -> bool: ...

    def add(
        self, prompt: Sequence[int], sampling: SamplingParams, *, priority: int, salt: str
    ) -> list[Request]: ...

    def finish(self, request: Request, reason: str) -> None: ...

    def step(self) -> list[Output]: ...


class Driver:
    """Submit prompts, step, collect.

    One thread at a time: whoever shares a driver holds a lock around each call.  Ctrl-C must not
    come in the middle of one (`interrupts.Uninterrupted`).
    """

    def __init__(
        self, engine: AnyEngine, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._clock = clock
        self._running: dict[int, tuple[Generation, _Progress]] = {}  # by request number

    @property
    def num_running(self) -> int:
        """Samples submitted and not finished."""
        return len(self._running)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        text: bool = True,
    ) -> Generation:
        """Queues one prompt (token ids) with its n samples.

        Raises ValueError when it can never run and QueueFull when the queue has no place; then
        nothing is queued. `text=False` skips detokenising, and with it stop strings.
        """
        requests = self._engine.add(prompt, sampling, priority=priority, salt=salt)
        samples = [
            _Progress(request, self._stream(request) if text else None) for request in requests
        ]
        generation = Generation(tuple(prompt), self._clock(), samples)
        for sample in samples:
            self._running[sample.request.number] = (generation, sample)
        return generation

    def step(self) -> list[Event]:
        """One step of the engine: what it brought, nothing when no result came back yet."""
        if self._running and not self._engine.has_work:
            raise RuntimeError(
                f"the engine has no work, but {self.num_running} requests are unfinished"
            )
        outputs = self._engine.step()
        now = self._clock()
        return [event for output in outputs for event in self._collect(output, now)]

    def abort(self, generation: Generation) -> None:
        """Ends all samples at once; a no-op for those that are finished."""
        for sample in generation.samples:
            if sample.finish_reason is None:
                self._engine.finish(sample.request, "abort")
                self._end(generation, sample, "abort", self._clock())

    def abort_all(self) -> None:
        """Ends everything that was submitted here."""
        for generation, _ in list(self._running.values()):
            self.abort(generation)

    def _stream(self, request: Request) -> TextStream:
        prompt = request.tokens[: request.num_prompt]
        asked = request.sampling
        return TextStream(self._tokenizer, prompt, asked.stop, min_tokens=asked.min_tokens)

    def _collect(self, output: Output, now: float) -> list[Event]:
        found = self._running.get(output.request.number)
        if found is None:  # ended here in an earlier step, or by another output of this one
            return []
        generation, sample = found
        if output.prompt_logprobs is not None:
            generation.prompt_logprobs = output.prompt_logprobs
        chunk = _advance(sample, output)
        if chunk.token_ids and generation.first_token is None:
            generation.first_token = now
        if chunk.finish_reason is not None:
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self._engine.finish(output.request, "stop")
            self._end(generation, sample, chunk.finish_reason, now)
        return [Event(generation, chunk)]

    def _end(self, generation: Generation, sample: _Progress, reason: str, now: float) -> None:
        sample.finish_reason = reason
        self._running.pop(sample.request.number, None)
        if all(other.finish_reason is not None for other in generation.samples):
            generation.finished = now


def _advance(sample: _Progress, output: Output) -> Chunk:
    """Takes the new tokens, up to the one that completes a stop string; the chunk says what they
    add."""
    tokens, reason, text = output.tokens, output.finish_reason, ""
    stream = sample.stream
    if stream is not None:
        ends_in_id = reason == "stop" and tokens and tokens[-1] in output.request.stop_ids
        # The id that ends a request is no text.
        text = stream.push(tokens[:-1] if ends_in_id else tokens)
        if stream.stopped is None and reason is not None:
            text += stream.flush()
        if stream.stopped is not None:
            tokens, reason = tokens[: stream.num_tokens_used - len(sample.token_ids)], "stop"
    logprobs = None if output.logprobs is None else output.logprobs[: len(tokens)]
    sample.token_ids.extend(tokens)
    sample.logprobs.extend(logprobs or ())
    return Chunk(output.request.sample, text, tokens, logprobs, reason)
