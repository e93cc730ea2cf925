"""The Python API: text in, text out."""

import contextlib
import operator
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

from jaxserve import settings
from jaxserve.completion import Chunk, Completion
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.driver import Driver, Generation
from jaxserve.fair_lock import FairLock
from jaxserve.interrupts import Uninterrupted
from jaxserve.request import SamplingParams
from jaxserve.text.chat import render_chat
from jaxserve.text.tokenizer import refuse_surrogates

if TYPE_CHECKING:
    from jaxserve.build import Assembly

type Prompt = str | Sequence[int]  # text, or token ids
type Messages = Sequence[Mapping[str, Any]]  # [{"role": ..., "content": ...}, ...]
type Sampling = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate.

    Any thread may call any method at any time: calls that overlap share the engine's batch, and
    each waits for its own results only.

        with LLM() as llm:
            print(llm.generate("The capital of France is")[0].text)
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig | None = None,
        *,
        config: EngineConfig | None = None,
        record: str | os.PathLike[str] | None = None,
        trace_out: str | os.PathLike[str] | None = None,
        **sections: Any,
    ) -> None:
        """Loads `model`: a folder, a .gguf file, a hub name, or a whole section such as
        `{"name": ..., "dtype": "float32"}`; None is the config's, by default the pinned model.

        `sections` go over `config`: `LLM(scheduler={"token_budget": 256},
        cache=CacheConfig(...))`.  `record` and `trace_out` name files: what every step did, and the
        same as a timeline for ui.perfetto.dev, complete once the LLM is closed.  Raises ValueError
        for settings that are wrong and for a model that cannot be loaded.
        """
        if isinstance(model, str | os.PathLike):
            model = {"name": os.fspath(model)}
        if model is not None:
            sections["model"] = model
        config = settings.merge(config or EngineConfig(), sections, "LLM(...)")
        from jaxserve.build import assemble  # imports jax, so only when a model is wanted

        self._start(assemble(config))
        if record is not None or trace_out is not None:
            from jaxserve.lab.record import recording_of

            files = (None if name is None else Path(name) for name in (record, trace_out))
            self._recording.enter_context(recording_of(self._open(), *files))

    @classmethod
    def from_assembly(cls, assembly: "Assembly") -> Self:
        """An LLM around an engine that is already assembled."""
        llm = cls.__new__(cls)
        llm._start(assembly)
        return llm

    def _start(self, assembly: "Assembly") -> None:
        self._assembly: Assembly | None = assembly
        self._driver = Driver(assembly.engine, assembly.tokenizer)
        self._lock = FairLock()
        self._recording = contextlib.ExitStack()
        self._streams: dict[Generation, deque[Chunk]] = {}  # chunks that a stream has not taken yet

    @property
    def config(self) -> EngineConfig:
        """The settings in use, nothing left to derive."""
        return self._open().config

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None
    ) -> list[Completion]:
        """One completion a prompt, in the order of `prompts`.

        A prompt is text or a list of token ids; a string or a flat list of ids is one prompt.
        `sampling` is for all, or a list with one for each; None is `SamplingParams()`.  When any
        prompt cannot run, ValueError names its index and nothing is generated.  A request that
        fails while it runs has finish_reason "error".
        """
        items = _prompt_list(prompts)
        samplings = _sampling_list(sampling, len(items))
        encode = self._open().tokenizer.encode
        return self._generate(
            [_token_ids(item, encode, index) for index, item in enumerate(items)], samplings
        )

    def chat(
        self, messages: Messages | Sequence[Messages], sampling: Sampling = None
    ) -> list[Completion]:
        """Like `generate`, for one conversation or a list of them, rendered with the model's chat
        template.

        Raises ValueError when the model has none.
        """
        talks = _conversations(messages)
        samplings = _sampling_list(sampling, len(talks))
        tokenizer = self._open().tokenizer
        prompts: list[list[int]] = []
        for index, talk in enumerate(talks):
            try:
                prompts.append(render_chat(tokenizer, talk))
            except ValueError as error:
                raise ValueError(f"messages[{index}]: {error}") from error
        return self._generate(prompts, samplings)

    def stream(self, prompt: Prompt | Messages, sampling: SamplingParams | None = None) -> "Stream":
        """Chunks of one prompt (text, token ids, or chat messages) as they are generated.

        The prompt is checked and queued by this call.  Leaving the loop early, `close()`, or
        dropping the stream cancels what is left.
        """
        tokenizer = self._open().tokenizer
        if _is_messages(prompt):
            ids = render_chat(tokenizer, cast(Messages, prompt))
        else:
            ids = _token_ids(cast(Prompt, prompt), tokenizer.encode, 0)
        with Uninterrupted(), self._lock:
            generation = self._driver.submit(ids, sampling or SamplingParams())
            self._streams[generation] = deque()
            stream = Stream(self, generation)  # exists before Ctrl-C can come: dropping it cancels
        return stream

    def close(self) -> None:
        """Cancels everything and lets go of weights and cache.  Idempotent."""
        with Uninterrupted(), self._lock:
            assembly, self._assembly = self._assembly, None
            if assembly is not None:
                self._driver.abort_all()
                self._recording.close()
                assembly.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _open(self) -> "Assembly":
        if self._assembly is None:
            raise RuntimeError("this LLM is closed")
        return self._assembly

    def _generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]
    ) -> list[Completion]:
        generations: list[Generation] = []
        try:
            with Uninterrupted(), self._lock:
                for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
                    try:
                        generations.append(self._driver.submit(prompt, sampling))
                    except ValueError as error:
                        raise ValueError(f"prompts[{index}]: {error}") from error
            for generation in generations:
                while not generation.done:
                    self._step()
        except BaseException:
            self._abort(generations)
            raise
        return [generation.completion() for generation in generations]

    def _step(self) -> None:
        """One step for everybody; chunks of streams go to their queues."""
        with Uninterrupted(), self._lock:
            self._open()
            for generation, chunk in self._driver.step():
                queue = self._streams.get(generation)
                if queue is not None:
                    queue.append(chunk)

    def _next_chunk(self, generation: Generation) -> Chunk | None:
        """The next chunk of a stream, or None after its last."""
        chunks = self._streams.get(generation)
        while chunks is not None:
            if chunks:
                return chunks.popleft()
            if generation.done:
                break
            self._step()
        self._streams.pop(generation, None)
        return None

    def _abort(self, generations: Sequence[Generation]) -> None:
        with Uninterrupted(), self._lock:
            if self._assembly is None:
                return
            for generation in generations:
                self._driver.abort(generation)
                self._streams.pop(generation, None)


class Stream(Iterator[Chunk]):
    """The chunks of one prompt; `completion()` once they are through."""

    def __init__(self, llm: LLM, generation: Generation) -> None:
        self._llm = llm
        self._generation = generation

    def __next__(self) -> Chunk:
        chunk = self._llm._next_chunk(self._generation)
        if chunk is None:
            raise StopIteration
        return chunk

    def completion(self) -> Completion:
        """Everything generated; RuntimeError while it still runs."""
        return self._generation.completion()

    def close(self) -> None:
        """Cancels what still runs.  Idempotent."""
        self._llm._abort([self._generation])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _is_messages(prompt: object) -> bool:
    """A list of chat messages, as against a prompt."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return isinstance(prompt[0], Mapping)


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if isinstance(messages, str | Mapping):
        raise ValueError("messages must be a list of {role, content}, or a list of such lists")
    return [cast(Messages, messages)] if _is_messages(messages) else list(cast(Any, messages))


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One entry a prompt; a string or a flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    is_ids = bool(items) and all(isinstance(item, SupportsIndex) for item in items)
    return [cast(Prompt, items)] if is_ids else cast(list[Prompt], items)


def _sampling_list(sampling: Sampling, count: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise ValueError(
            f"{len(sampling)} SamplingParams for {count} prompts; give one each, or one for all"
        )
    return list(sampling)


def _token_ids(prompt: Prompt, encode: Callable[[str], list[int]], index: int) -> list[int]:
    if isinstance(prompt, str):
        refuse_surrogates(prompt, f"prompts[{index}]")
        return encode(prompt)
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise ValueError(
            f"prompts[{index}] must be text or a list of token ids: {error}"
        ) from error
