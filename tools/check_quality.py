"""Is a data type good enough to serve with?  One model twice, in float32 and in the type to judge.

    python -m tools.check_quality [--dtype bfloat16] [--kv-dtype bfloat16] [--quantize int8]
                                  [--model M] [--json]

Both run the engine's own programs over the same tokens: 20 committed texts (prose, chat, code,
data, other scripts), each followed by the float32 model's own greedy answer, and one document of
2,800 tokens, which crosses chunk borders and windows.  At every position the whole distributions
over the vocabulary are compared, a few positions at a time: with a vocabulary of 262,000 those of
one document are 3 GB.  Exit code 0: within LIMITS.  1: not.  2: the model cannot be loaded.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.batch.step import Batch, StepResult
from jaxserve.build import Assembly, assemble
from jaxserve.config import (
    DTYPES,
    QUANTIZE,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SamplingConfig,
    SchedulerConfig,
)
from jaxserve.engine import Engine, ModelLimits
from jaxserve.request import SamplingParams
from tests.reference import files

ANSWER_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Figures:
    """How far a model is from the float32 one; all over positions, in nats where not said."""

    positions: int
    mean_kl: float  # KL(float32 || other)
    p999_kl: float
    max_kl: float
    perplexity: float  # of the other model, of the tokens that stand there
    perplexity_ratio: float  # other / float32
    rms_dp: float  # root mean square of the change of the standing token's probability
    agreement: float  # share of positions at which both would choose the same token
    widest_flip: float  # largest lead of the float32 choice (in logits) that was overturned


@dataclasses.dataclass(frozen=True)
class Limits:
    """What still counts as the same model.

    `mean_kl` and `rms_dp` stay under what llama.cpp measures for Q8_0 weights (0.00136 nats,
    1.2 %: tools/perplexity/README.md there), which are commonly served as lossless; `perplexity`
    allows half a percent either way.  `max_kl` and `widest_flip` are for single tokens, which a
    mean hides: no token may be chosen against a lead of half a logit (odds of 1.65 to 1).
    """

    mean_kl: float = 0.001
    max_kl: float = 0.1
    perplexity: float = 0.005
    rms_dp: float = 0.012
    agreement: float = 0.98
    widest_flip: float = 0.5


LIMITS = Limits()


def failures(found: Figures, limits: Limits = LIMITS) -> list[str]:
    """What is out of bounds, one line each; NaN is."""
    pairs = [
        ("mean_kl", found.mean_kl, limits.mean_kl),
        ("max_kl", found.max_kl, limits.max_kl),
        ("distance of perplexity_ratio from 1", abs(found.perplexity_ratio - 1), limits.perplexity),
        ("rms_dp", found.rms_dp, limits.rms_dp),
        ("share without agreement", 1 - found.agreement, 1 - limits.agreement),
        ("widest_flip", found.widest_flip, limits.widest_flip),
    ]
    return [f"{name} {value:.4g} > {most:.4g}" for name, value, most in pairs if not value <= most]


def compare(reference: np.ndarray, other: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Logits f32[n, V] of two models, and the tokens that stand there -> f64[n, 5]: a position's
    KL, both nll, whether the choice is the same, the lead of the reference's choice."""
    p, q = _log_softmax(reference), _log_softmax(other)
    row = np.arange(len(tokens))
    best = np.argmax(reference, axis=1)
    rival = np.argmax(other, axis=1)
    return np.stack(
        [
            np.sum(np.exp(p) * (p - q), axis=1),
            -p[row, tokens],
            -q[row, tokens],
            best == rival,
            (reference[row, best] - reference[row, rival]).astype(np.float64),
        ],
        axis=1,
    )


def summary(compared: np.ndarray) -> Figures:
    """Of rows that `compare` gave."""
    kl, nll, other_nll, same, lead = compared.T
    flipped = lead[same == 0]
    return Figures(
        positions=len(kl),
        mean_kl=float(kl.mean()),
        p999_kl=float(np.quantile(kl, 0.999)),
        max_kl=float(kl.max()),
        perplexity=math.exp(other_nll.mean()),
        perplexity_ratio=math.exp(other_nll.mean() - nll.mean()),
        rms_dp=float(np.sqrt(np.mean((np.exp(-other_nll) - np.exp(-nll)) ** 2))),
        agreement=float(same.mean()),
        widest_flip=float(flipped.max()) if len(flipped) else 0.0,
    )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


class Subject:
    """A model behind the engine, whose logits can be read."""

    def __init__(self, assembly: Assembly) -> None:
        self.tokenizer = assembly.tokenizer
        self._runner = _Recorder(assembly.runner)
        windows = assembly.engine.limits.windows
        limits = ModelLimits(assembly.runner.step.vocab_size, frozenset(), windows)
        self._engine = Engine(assembly.config, self._runner, limits)

    def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """`length` greedy tokens for each prompt."""
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        requests = [self._engine.add(prompt, sampling)[0] for prompt in prompts]
        while self._engine.has_work:
            self._engine.step()
        return [list(request.tokens[request.num_prompt :]) for request in requests]

    def logits(self, tokens: Sequence[int]) -> Iterator[np.ndarray]:
        """f32[n, V] after f32[n, V]: what the model says about tokens[1], tokens[2] and so on, as
        many at a time as one program of the head makes.

        They come through a request with prompt logprobs; RuntimeError when what that request was
        given is not what these logits say.
        """
        self._runner.hidden.clear()
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        self._engine.add(tokens, sampling)
        served: tuple[Any, ...] = ()
        while self._engine.has_work:
            for output in self._engine.step():
                served = output.prompt_logprobs or served
        hidden = np.concatenate(self._runner.hidden)
        chosen = [entry.logprob for entry in served[1:]]
        start = 0
        for logits in self._runner.logits(hidden):
            end = start + len(logits)
            own = _log_softmax(logits)[np.arange(len(logits)), tokens[start + 1 : end + 1]]
            if not np.allclose(own, chosen[start:end], rtol=0, atol=1e-3):
                raise RuntimeError("the recorded logits are not those that were served")
            yield logits
            start = end


class _Recorder:
    """A runner that keeps the hidden states from which it scores prompts."""

    def __init__(self, runner: Any) -> None:
        self.hidden: list[np.ndarray] = []  # [n, D]
        self._runner = runner

    def dispatch(self, batch: Batch) -> Any:
        handle = self._runner.dispatch(batch)
        for score in batch.scores:
            hidden = np.asarray(self._runner.state.hidden[score.token_index])
            self.hidden.append(hidden[score.token_index < batch.token_bucket])
        return handle

    def result(self, handle: Any) -> StepResult:
        return self._runner.result(handle)

    def logits(self, hidden: np.ndarray) -> Iterator[np.ndarray]:
        """Of hidden states [T, D], by the program that scores prompts: f32[n, V], n at most its
        rows."""
        runner = self._runner
        rows = runner.manifest.buckets("head")[-1]
        head = runner.manifest.get("head", rows)
        weights = runner.step.head_weights(runner.weights)
        shape = runner.state.hidden.shape
        piece = min(rows, shape[0])
        for start in range(0, len(hidden), piece):
            part = hidden[start : start + piece]
            states = np.zeros(shape, hidden.dtype)
            states[: len(part)] = part
            logits = head(weights, states, np.arange(rows, dtype=np.int32))
            yield np.asarray(logits)[: len(part), : runner.step.vocab_size]


def measure(
    reference: Subject,
    other: Subject,
    texts: Sequence[Sequence[int]],
    document: Sequence[int],
    *,
    length: int,
) -> dict[str, Figures]:
    """Figures for the texts, for the reference's greedy answers to them, for the document, and for
    everything.
    """
    answers = reference.answer(texts, length)
    parts: dict[str, list[np.ndarray]] = {"texts": [], "answers": []}
    for text, answer in zip(texts, answers, strict=True):
        found = _along(reference, other, [*text, *answer])
        border = len(text) - 1
        parts["texts"].append(found[:border])
        parts["answers"].append(found[border:])
    parts["document"] = [_along(reference, other, document)]
    parts["all"] = [rows for part in parts.values() for rows in part]
    return {name: summary(np.concatenate(part)) for name, part in parts.items()}


def _along(reference: Subject, other: Subject, tokens: Sequence[int]) -> np.ndarray:
    """`compare` at every position of a text: f64[len(tokens) - 1, 5]."""
    found: list[np.ndarray] = []
    at = 1
    for first, second in zip(reference.logits(tokens), other.logits(tokens), strict=True):
        found.append(compare(first, second, tokens[at : at + len(first)]))
        at += len(first)
    return np.concatenate(found)


def load(model: ModelConfig, kv_dtype: str) -> Assembly:
    """The model as it is served by default, but for what this check never uses."""
    return assemble(
        EngineConfig(
            model=model,
            cache=CacheConfig(memory_gib=0.5, prefix_caching=False, dtype=kv_dtype),
            scheduler=SchedulerConfig(max_seqs=32),
            sampling=SamplingConfig(random=False, penalties=False),
            runner=RunnerConfig(prove=False),
        )
    )


def check(
    judged: ModelConfig, kv_dtype: str = "auto", *, length: int = ANSWER_TOKENS
) -> dict[str, Figures]:
    """`measure` on the committed texts; the model in float32 throughout, and as `judged` over KV of
    `kv_dtype`."""
    made = [load(ModelConfig(judged.name, dtype="float32"), "auto"), load(judged, kv_dtype)]
    try:
        reference, other = (Subject(assembly) for assembly in made)
        prompts = files.real_prompts().values()
        texts = [reference.tokenizer.encode(prompt.text) for prompt in prompts]
        document = reference.tokenizer.encode(files.long_text())
        return measure(reference, other, texts, document, length=length)
    finally:
        for assembly in made:
            assembly.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().name, help="a name or a path")
    parser.add_argument("--dtype", default="bfloat16", help="the type to judge")
    parser.add_argument("--kv-dtype", default="auto", choices=DTYPES, help="of its KV; auto: as it")
    parser.add_argument("--quantize", default="none", choices=QUANTIZE, help="its weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        judged = ModelConfig(args.model, args.dtype, args.quantize)
        found = check(judged, args.kv_dtype)
    except (ValueError, OSError) as error:
        print(f"check_quality: {error}", file=sys.stderr)
        return 2
    wrong = failures(found["all"])
    name = args.dtype
    if args.quantize != "none":
        name += f" with {args.quantize} weights"
    if args.kv_dtype != "auto":
        name += f" over {args.kv_dtype} KV"
    if args.json:
        figures = {name: dataclasses.asdict(part) for name, part in found.items()}
        print(json.dumps({"judged": name, "failures": wrong, "figures": figures}))
    else:
        Console().print(_table(found, name))
        print("\n".join(wrong) or f"{name} is within the limits")
    return 1 if wrong else 0


def _table(found: dict[str, Figures], judged: str) -> Table:
    limits = dataclasses.asdict(LIMITS)
    limits["perplexity_ratio"] = f"1 ± {limits.pop('perplexity'):g}"
    table = Table(*("", *found, "limit"), title=f"{judged} against float32")
    for field in dataclasses.fields(Figures):
        values = [getattr(part, field.name) for part in found.values()]
        sign = "≥ " if field.name == "agreement" else "≤ "
        limit = limits.get(field.name, "")
        table.add_row(
            field.name,
            *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values),
            limit if isinstance(limit, str) else f"{sign}{limit:g}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
