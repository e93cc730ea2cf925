"""Is a data type good enough to serve with?  One model twice, in float32 and in the type to judge.

    python -m tools.check_quality [--dtype bfloat16] [--kv-dtype bfloat16] [--quantize int8]
                                  [--model M] [--json]

Both run the engine's own programs over the same tokens: 20 committed texts (prose, chat, code,
data, other scripts), each followed by the float32 model's own greedy answer, and one document of
2,800 tokens, which crosses chunk borders and windows.  At every position the whole distributions
over the vocabulary are compared.  Exit code 0: within LIMITS.  1: not.  2: the model
cannot be loaded.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
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
_ROWS = 64  # positions compared at a time: float64 copies of whole distributions are large


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


class Comparison:
    """Positions at which two models were asked for the next token."""

    def __init__(self) -> None:
        self._columns: list[np.ndarray] = []  # f64[n, 5]: kl, both nll, same choice, lead

    def add(self, reference: np.ndarray, other: np.ndarray, tokens: Sequence[int]) -> None:
        """Logits f32[n, V] of both models, and the tokens that stand there."""
        for start in range(0, len(tokens), _ROWS):
            rows = slice(start, start + _ROWS)
            self._columns.append(_compare(reference[rows], other[rows], np.asarray(tokens[rows])))

    def figures(self) -> Figures:
        kl, nll, other_nll, same, lead = np.concatenate(self._columns).T
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

    def extend(self, other: "Comparison") -> None:
        self._columns += other._columns


def _compare(reference: np.ndarray, other: np.ndarray, tokens: np.ndarray) -> np.ndarray:
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

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """f32[T - 1, V]: row i is what the model says about tokens[i + 1].

        They come through a request with prompt logprobs; RuntimeError when what that request was
        given is not what these logits say.
        """
        self._runner.logits.clear()
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        self._engine.add(tokens, sampling)
        served: tuple[Any, ...] = ()
        while self._engine.has_work:
            for output in self._engine.step():
                served = output.prompt_logprobs or served
        logits = np.concatenate(self._runner.logits)
        chosen = [entry.logprob for entry in served[1:]]
        for start in range(0, len(chosen), _ROWS):
            part = _log_softmax(logits[start : start + _ROWS])
            own = part[np.arange(len(part)), tokens[start + 1 : start + 1 + len(part)]]
            if not np.allclose(own, chosen[start : start + _ROWS], rtol=0, atol=1e-3):
                raise RuntimeError("the recorded logits are not those that were served")
        return logits


class _Recorder:
    """A runner that keeps the logits from which it scores prompts."""

    def __init__(self, runner: Any) -> None:
        self.logits: list[np.ndarray] = []
        self._runner = runner

    def dispatch(self, batch: Batch) -> Any:
        handle = self._runner.dispatch(batch)
        for score in batch.scores:
            head = self._runner.manifest.get("head", len(score.targets))
            weights = self._runner.step.head_weights(self._runner.weights)
            logits = head(weights, self._runner.state.hidden, score.token_index)
            real = score.token_index < batch.token_bucket
            self.logits.append(np.asarray(logits)[real, : self._runner.step.vocab_size])
        return handle

    def result(self, handle: Any) -> StepResult:
        return self._runner.result(handle)


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
    parts = {"texts": Comparison(), "answers": Comparison(), "document": Comparison()}
    answers = reference.answer(texts, length)
    for text, answer in zip(texts, answers, strict=True):
        tokens = [*text, *answer]
        both = reference.logits(tokens), other.logits(tokens)
        border = len(text) - 1
        parts["texts"].add(both[0][:border], both[1][:border], tokens[1 : len(text)])
        parts["answers"].add(both[0][border:], both[1][border:], answer)
    parts["document"].add(reference.logits(document), other.logits(document), document[1:])
    everything = Comparison()
    for part in parts.values():
        everything.extend(part)
    return {name: part.figures() for name, part in (parts | {"all": everything}).items()}


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
