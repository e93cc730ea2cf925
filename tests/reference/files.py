"""The committed reference files, read; tools/make_references.py made them."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.reference import tiny

FOLDER = Path(__file__).parent
# A greedy step whose two best logits are closer may go either way in another float32 program.
NEAR_TIE = 1e-3


class TinyCase(NamedTuple):
    config: dict[str, Any]
    seed: int
    sha256: str  # of the weights
    prompts: dict[int, list[int]]  # length -> ids
    logits: dict[int, np.ndarray]  # length -> f32[T, V], from transformers without a cache
    greedy: dict[
        int, list[int]
    ]  # length -> ids, transformers computing all tokens anew at every step

    def weights(self) -> dict[str, np.ndarray]:
        return tiny.make_weights(self.config, self.seed)


class RealPrompt(NamedTuple):
    text: str
    ids: list[int]
    logprobs: np.ndarray  # f32[T]  log p(ids[i] | ids[:i]); entry 0 means nothing
    greedy: list[int]  # 64 ids; end-of-sequence ids are ordinary tokens
    gaps: np.ndarray  # f32[64]  distance between the two best logits of each step


class LongText(NamedTuple):
    ids: list[int]
    logprobs: np.ndarray  # f32[T]  as of a RealPrompt
    perplexity: float


class Golden(NamedTuple):
    prompt: list[int]
    output: list[int]


def tiny_case(name: str) -> TinyCase:
    case = _json("tiny.json")["cases"][name]
    seed = case["seed"]
    return TinyCase(
        config=tiny.CONFIGS[name],
        seed=seed,
        sha256=case["sha256"],
        prompts={length: tiny.make_prompt(length, seed + length) for length in tiny.LENGTHS},
        logits={length: _arrays("tiny.npz")[f"{name}.{length}"] for length in tiny.LENGTHS},
        greedy={int(length): prompt["greedy"] for length, prompt in case["prompts"].items()},
    )


def real_prompts(stem: str = "real") -> dict[str, RealPrompt]:
    """Of the default model, or with `real_gemma3` of Gemma 3 270M."""
    texts, arrays = _json("real_prompts.json"), _arrays(f"{stem}.npz")
    return {
        name: RealPrompt(
            text=texts[name],
            ids=entry["ids"],
            logprobs=arrays[f"{name}.logprobs"],
            greedy=entry["greedy"],
            gaps=arrays[f"{name}.gaps"],
        )
        for name, entry in _json(f"{stem}.json")["prompts"].items()
    }


def real_source(stem: str = "real") -> str:
    """sha256 of the GGUF file that the real references were made from."""
    return _json(f"{stem}.json")["source"]["sha256"]


def long_text() -> str:
    """Prose, a program, figures, questions and answers: more than Gemma's window five times."""
    return (FOLDER / "long_text.txt").read_text(encoding="utf-8")


def long_reference(sha256: str) -> LongText:
    """What transformers says of the long text with the weights of that GGUF file."""
    for name, entry in _json("long.json")["models"].items():
        if entry["source"]["sha256"] == sha256:
            return LongText(entry["ids"], _arrays("long.npz")[name], entry["perplexity"])
    raise KeyError(sha256)


def golden(workload: str) -> list[Golden]:
    """Workload `W1` or `W4`, with the float32 outputs on which transformers and vLLM agree."""
    return [Golden(entry["prompt"], entry["output"]) for entry in _json("golden.json")[workload]]


@functools.cache
def _json(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


@functools.cache
def _arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name) as file:
        return dict(file)
