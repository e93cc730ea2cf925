"""A tiny model behind the real engine and runner, and what the dense reference says about it."""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models

from jaxserve.batch.step import Batch, StepResult
from jaxserve.build import assemble
from jaxserve.config import (
    BucketConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SamplingConfig,
    SchedulerConfig,
)
from jaxserve.engine import Engine, ModelLimits
from jaxserve.request import Request, SamplingParams, TokenLogprobs
from tests.models.weight_files import write_folder
from tests.reference import files, tiny
from tests.reference.dense import Dense

BLOCK = 8
MAX_LEN = 96
TOLERANCE = 1e-4
NUM_TOP = 5  # most likely tokens asked for and compared
EOS = 2

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=NUM_TOP)
ONLY_GREEDY = SamplingConfig(random=False, penalties=False)
SCORED = dataclasses.replace(GREEDY, prompt_logprobs=NUM_TOP)


@dataclasses.dataclass
class Answer:
    """All that an engine gave for one request."""

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None

    def bits(self) -> tuple[Any, ...]:
        """Equal exactly when every token and every float is."""
        return tuple(self.tokens), tuple(self.logprobs), self.prompt_logprobs, self.finish_reason


class Rig:
    """`name` is one of the tiny configs.  Engines made from a rig share its compiled programs."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        budgets: tuple[int, ...] = (16, MAX_LEN),
        max_seqs: int = 6,
        num_blocks: int = 64,
        sampling: SamplingConfig = ONLY_GREEDY,
        deterministic: bool = False,
        chunk_size: int = MAX_LEN,
        layers: str = "loop",
        quantize: str = "none",
        window: int | None = None,
        max_len: int = MAX_LEN,
    ) -> None:
        case = files.tiny_case(name)
        weights = case.weights()
        hf = _served(case.config)
        if window is not None:
            hf = hf | {"sliding_window": window}
        write_folder(folder, hf, weights)
        write_tokenizer(folder)
        config = EngineConfig(
            model=ModelConfig(
                name=str(folder), dtype="float32", quantize=quantize, max_len=max_len
            ),
            cache=CacheConfig(block_size=BLOCK, num_blocks=num_blocks),
            scheduler=SchedulerConfig(
                token_budget=budgets[-1], max_seqs=max_seqs, chunk_size=chunk_size, watermark=0.0
            ),
            buckets=BucketConfig(tokens=budgets, rows=(max_seqs,)),
            sampling=sampling,
            runner=RunnerConfig(
                compile_cache=os.environ.get("JAX_COMPILATION_CACHE_DIR", "off"),
                prove=False,
                deterministic=deterministic,
                layers=layers,
            ),
        )
        self.assembly = assemble(config)
        self.runner, self.config = self.assembly.runner, self.assembly.config
        served = weights if quantize == "none" else rounded_to_int8(weights)
        self.reference = Reference(Dense(hf, served, length=max_len, window=window))

    def engine(self, **changes: dict[str, Any]) -> Engine:
        """A fresh engine on a cache full of NaN; `section={name: value}` changes its config.

        B02: an unwritten slot that is read makes the answer NaN.
        """
        self.poison()
        sections = {
            section: dataclasses.replace(getattr(self.config, section), **values)
            for section, values in changes.items()
        }
        config = dataclasses.replace(self.config, **sections)
        budget = config.scheduler.token_budget
        sizes = tuple(size for size in self.config.buckets.tokens if size <= budget)
        assert sizes and sizes[-1] == budget, f"budget {budget} is not a bucket of this rig"
        buckets = dataclasses.replace(config.buckets, tokens=sizes)
        windows = self.assembly.engine.limits.windows
        limits = ModelLimits(tiny.VOCAB, frozenset({EOS}), windows)
        return Engine(dataclasses.replace(config, buckets=buckets), self.runner, limits)

    def poison(self) -> None:
        def nan(array: jax.Array) -> jax.Array:
            return jax.device_put(np.full(array.shape, np.nan, array.dtype), array.sharding)

        self.runner.state.kv = jax.tree.map(nan, self.runner.state.kv)

    def check(self, answers: Sequence[Answer]) -> None:
        """Tokens equal those of the dense reference; logprobs are within the tolerance."""
        for answer in answers:
            self.reference.check(answer)


def rounded_to_int8(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every matrix with 127 steps a row on either side of zero, float64 in between."""

    def rounded(weight: np.ndarray) -> np.ndarray:
        scale = np.abs(weight).max(axis=1, keepdims=True).astype(np.float64) / 127
        return (np.round(weight / scale) * scale).astype(np.float32)

    return {name: rounded(w) if w.ndim == 2 else w for name, w in weights.items()}


class Poisoner:
    """Stands between engine and runner: before every step, each block that no request holds and
    that the prefix cache cannot find is full of NaN."""

    def __init__(self, engine: Engine, runner: Any) -> None:
        self._runner, self._kv = runner, engine.kv
        self._block_size = engine.config.cache.block_size
        self._fill = jax.jit(runner.step.fill_slots, donate_argnums=0)
        self.poisoned = 0  # blocks
        engine._runner = self

    def dispatch(self, batch: Batch) -> Any:
        blank = self._kv._pool._blank
        self.poisoned += len(blank)
        slots = np.full((self._kv.num_blocks, self._block_size), self._runner.num_slots, np.int32)
        offsets = np.arange(self._block_size, dtype=np.int32)
        slots[: len(blank)] = np.array(blank, np.int32)[:, None] * self._block_size + offsets
        state = self._runner.state
        state.kv = self._fill(state.kv, slots.reshape(-1), np.float32("nan"))
        return self._runner.dispatch(batch)

    def result(self, handle: Any) -> StepResult:
        return self._runner.result(handle)


class Reference:
    """Greedy continuations of the dense model, computed once for each prompt."""

    def __init__(self, dense: Dense) -> None:
        self.dense = dense
        self._known: dict[tuple[int, ...], list[int]] = {}  # prompt -> longest continuation so far

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        known = self._known.setdefault(tuple(prompt), [])
        if len(known) < count:
            known += self.dense.greedy([*prompt, *known], count - len(known))
        return known[:count]

    def check(self, answer: Answer) -> None:
        request = answer.request
        prompt = request.tokens[: request.num_prompt]
        assert answer.tokens == self.greedy(prompt, len(answer.tokens))
        logprobs = self.dense.logprobs([*prompt, *answer.tokens])
        if request.sampling.logprobs is not None:
            assert len(answer.logprobs) == len(answer.tokens)
            for found, expected in zip(answer.logprobs, logprobs[len(prompt) - 1 :], strict=False):
                compare(found, expected)
        if request.sampling.prompt_logprobs is None:
            assert answer.prompt_logprobs is None
            return
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == len(prompt) and answer.prompt_logprobs[0] is None
        for token, found, expected in zip(
            prompt[1:], answer.prompt_logprobs[1:], logprobs, strict=False
        ):
            assert found is not None and found.token == token
            compare(found, expected)


def compare(found: TokenLogprobs, expected: np.ndarray) -> None:
    """One entry against the dense log-probabilities f64[V] of its place."""
    assert abs(found.logprob - expected[found.token]) < TOLERANCE
    least, most = (
        1 + int(np.sum(expected > expected[found.token] + slack))
        for slack in (TOLERANCE, -TOLERANCE)
    )
    assert least <= found.rank <= most
    best = np.sort(expected)[::-1]
    assert len({token for token, _ in found.top}) == len(found.top)
    for (token, logprob), value in zip(found.top, best, strict=False):
        assert abs(logprob - expected[token]) < TOLERANCE and abs(logprob - value) < TOLERANCE


def refuse_growth(engine: Engine, refused: Collection[int]) -> Callable[[], int]:
    """Wishes for more blocks while others run are numbered from 1; the `refused` ones are refused
    once each, so that somebody is preempted however roomy the pool.

    Returns how many there have been.  A request alone is never refused: the promise of KVManager.
    """
    kv, wishes = engine.kv, 0
    real = kv.try_grow

    def try_grow(request: Request, num_tokens: int) -> bool:
        nonlocal wishes
        grows = kv.blocks_for(request.num_computed + num_tokens) > request.num_blocks
        if not grows or len(engine.scheduler.running) == 1:
            return real(request, num_tokens)
        wishes += 1
        return wishes not in refused and real(request, num_tokens)

    kv.try_grow = try_grow
    return lambda: wishes


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> list[Answer]:
    """Submits all prompts at once and runs the engine until it has no work."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    requests = [
        request
        for prompt, params in zip(prompts, each, strict=True)
        for request in engine.add(prompt, params)
    ]
    answers = {request: Answer(request) for request in requests}
    drain(engine, answers)
    return list(answers.values())


def drain(engine: Engine, answers: dict[Request, Answer], steps: int = 100_000) -> None:
    """Runs the engine for at most `steps` steps and collects what it gives."""
    for _ in range(steps):
        if not engine.has_work:
            engine.kv.check(engine.scheduler.running)
            assert engine.kv.num_used == 0, "blocks are lost"
            return
        for output in engine.step():
            answer = answers[output.request]
            assert answer.finish_reason is None, "output after the end"
            answer.tokens.extend(output.tokens)
            answer.logprobs.extend(output.logprobs or ())
            if output.prompt_logprobs is not None:
                assert answer.prompt_logprobs is None, "prompt logprobs came twice"
                answer.prompt_logprobs = output.prompt_logprobs
            answer.finish_reason = output.finish_reason


def _served(hf: dict[str, Any]) -> dict[str, Any]:
    """The config, with a dynamic rope stretched as far as the rig serves."""
    scaling = hf.get("rope_scaling") or {}
    if scaling.get("rope_type") != "dynamic":
        return hf
    return hf | {"rope_scaling": scaling | {"factor": MAX_LEN / hf["max_position_embeddings"]}}


def write_tokenizer(folder: Path) -> None:
    """One word an id: enough for a model folder to be complete."""
    vocab = {f"t{token}": token for token in range(tiny.VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
