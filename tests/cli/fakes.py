"""A whole assembly without jax: the real engine and tokenizer code around an arithmetic model.

The fake model's next token is a hash of the last token and its position (and of the seed when the
row samples), so it does not depend on how steps were cut or who else was in them.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.batch.buckets import resolve
from jaxserve.batch.step import Batch, Logprobs, SampleInputs, StepResult
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, ModelLimits
from jaxserve.text.parts import TokenizerParts
from jaxserve.text.tokenizer import Tokenizer

EOS = "<|eos|>"
MARK = "<|turn|>"
EOS_ID, MARK_ID = 256, 257
VOCAB = 258
CHAT = (
    "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


def byte_tokenizer(*, chat: bool = True) -> Tokenizer:
    """One token a byte (id = its place in the byte alphabet), EOS and a mark between turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, MARK])
    parts = TokenizerParts(
        source="fake",
        backend=backend,
        named={"eos_token": EOS},
        eos_ids=frozenset({EOS_ID}),
        prefix=(),
        suffix=(),
        chat_template=CHAT if chat else None,
    )
    return Tokenizer(parts)


class FakeRunner:
    """Answers at once; `bad_after` makes the logits of a position not finite."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._last = np.zeros(config.scheduler.max_seqs + 1, np.int64)
        self._letters = np.array(tokenizer.encode("abcdefghijklmnopqrstuvwxyz .,é"), np.int64)
        self.bad_position: int | None = None
        self.steps = 0
        self.compiles_after_warmup = 0
        self.manifest = FakeManifest()
        self.closed = False

    def dispatch(self, batch: Batch) -> StepResult:
        self.steps += 1
        inputs = batch.inputs
        seats = np.minimum(inputs.token_seats, len(self._last) - 1)
        known = inputs.token_seats >= len(self._last) - 1
        tokens = np.where(known, inputs.tokens, self._last[seats])
        if batch.samples is None:
            return StepResult(
                np.zeros(0, np.int32), np.zeros(0, bool), None, self._scores(batch, tokens), 1e-4
            )
        x = batch.samples
        at = np.minimum(x.token_index, len(tokens) - 1)
        positions = inputs.positions[at].astype(np.int64) + 1
        sampled = self._sample(tokens[at], positions, x)
        self._last[np.minimum(x.seats, len(self._last) - 1)] = sampled
        bad = np.zeros(len(sampled), bool)
        if self.bad_position is not None:
            bad = positions == self.bad_position
        logprobs = _logprobs(sampled) if batch.logprobs else None
        return StepResult(
            sampled.astype(np.int32), bad, logprobs, self._scores(batch, tokens), 1e-4
        )

    def result(self, handle: StepResult) -> StepResult:
        return handle

    def touch_kv(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def costs(self) -> dict[int, float]:
        return {}

    def _sample(self, last: np.ndarray, positions: np.ndarray, x: SampleInputs) -> np.ndarray:
        noise = x.seed.astype(np.int64).sum(1) % 100_003 + 17 * x.sample.astype(np.int64)
        noise = np.where(x.temperature > 0, noise, 0)
        mixed = last * 1_000_003 + positions * 7_919 + noise * 104_729
        for _ in range(3):
            mixed = (mixed ^ (mixed >> 15)) * 2_654_435_761 % 2**31
        letters = self._letters[(mixed >> 8) % len(self._letters)]
        ends = (mixed % 61 == 0) & ~x.suppress_stops
        return np.where(ends, EOS_ID, letters)

    def _scores(self, batch: Batch, tokens: np.ndarray) -> tuple[Logprobs, ...]:
        return tuple(_logprobs(np.asarray(score.targets)) for score in batch.scores)


class FakeManifest:
    compile_s = 0.5

    def __len__(self) -> int:
        return 3

    def table(self) -> list[dict[str, Any]]:
        return []


def _logprobs(tokens: np.ndarray) -> Logprobs:
    """Minus infinity at the second place, as masks leave it."""
    rows = len(tokens)
    top_ids = (tokens[:, None] + np.arange(20)[None]) % VOCAB
    top = np.full((rows, 20), -np.inf, np.float32)
    top[:, 0] = -0.25
    return Logprobs(top[:, 0].copy(), np.ones(rows, np.int32), top_ids.astype(np.int32), top)


@dataclasses.dataclass
class FakeAssembly:
    engine: Engine
    runner: FakeRunner
    tokenizer: Tokenizer
    config: EngineConfig
    startup: dict[str, float]
    cost_facts: dict[str, Any]
    cost_file: Path | None = None

    def close(self) -> None:
        self.runner.close()


def assemble(
    config: EngineConfig,
    *,
    on_step: Callable[..., None] | None = None,
    on_compile: Callable[[int], None] = lambda count: None,
    log: Callable[[str], None] = lambda line: None,
    chat: bool = True,
    max_len: int = 256,
) -> Any:
    """Stands in for jaxserve.build.assemble."""
    config = resolve(config, max_len, 1 << 20)
    tokenizer = byte_tokenizer(chat=chat)
    runner = FakeRunner(config, tokenizer)
    limits = ModelLimits(VOCAB, frozenset({EOS_ID}))
    engine = Engine(config, runner, limits, on_step=on_step)
    return FakeAssembly(engine, runner, tokenizer, config, {"load": 0.1}, {"device": "none"})
