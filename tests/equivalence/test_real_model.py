"""The default model in float32 through the whole engine, against transformers and the golden
outputs on which transformers and vLLM agree."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from jaxserve.build import Assembly, assemble
from jaxserve.config import (
    BucketConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SamplingConfig,
    SchedulerConfig,
)
from jaxserve.request import SamplingParams
from tests.equivalence.rig import Answer, generate
from tests.reference import files

PROMPTS = files.real_prompts()
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
NUM_GOLDEN = 10  # requests of W1 in the default suite


def make(budget: int, buckets: BucketConfig, *, prove: bool) -> Assembly:
    return assemble(
        EngineConfig(
            model=ModelConfig(dtype="float32", max_len=1024),
            scheduler=SchedulerConfig(token_budget=budget, max_seqs=min(32, budget)),
            buckets=buckets,
            sampling=SamplingConfig(random=False, penalties=False),
            runner=RunnerConfig(prove=prove, compile_cache="off"),
        )
    )


@pytest.fixture(scope="module")
def assembly() -> Iterator[Assembly]:
    made = make(192, BucketConfig(tokens=(16, 32, 192), rows=(8, 32)), prove=False)
    yield made
    made.close()


class Run(NamedTuple):
    scored: dict[str, Answer]  # the 20 prompts, 64 greedy ids each
    golden: list[Answer]  # the first requests of W1


@pytest.fixture(scope="module")
def run(assembly: Assembly) -> Run:
    """All at once, so that every step is mixed."""
    scored = dataclasses.replace(GREEDY, prompt_logprobs=0)
    golden = files.golden("W1")[:NUM_GOLDEN]
    found = generate(
        assembly.engine,
        [prompt.ids for prompt in PROMPTS.values()] + [request.prompt for request in golden],
        [scored] * len(PROMPTS) + [_as_long_as(request) for request in golden],
    )
    return Run(dict(zip(PROMPTS, found[: len(PROMPTS)], strict=True)), found[len(PROMPTS) :])


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_logprobs_equal_transformers(run: Run, name: str) -> None:
    entries = run.scored[name].prompt_logprobs
    assert entries is not None and entries[0] is None
    assert [entry.token for entry in entries[1:] if entry] == PROMPTS[name].ids[1:]
    found = [entry.logprob for entry in entries[1:] if entry]
    np.testing.assert_allclose(found, PROMPTS[name].logprobs[1:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", PROMPTS)
def test_64_greedy_ids_equal_transformers(run: Run, name: str) -> None:
    assert run.scored[name].tokens == PROMPTS[name].greedy, _first_difference(
        run.scored[name], name
    )


def _first_difference(answer: Answer, name: str) -> str:
    expected, gaps = PROMPTS[name].greedy, PROMPTS[name].gaps
    place = next(
        i for i, pair in enumerate(zip(answer.tokens, expected, strict=True)) if pair[0] != pair[1]
    )
    return f"id {place} differs, where the two best logits are {gaps[place]:.2g} apart"


def test_golden_w4_token_for_token(assembly: Assembly) -> None:
    """Alone: one decode a step."""
    requests = files.golden("W4")
    _assert_equal(_generate(assembly, requests), requests)


def test_golden_w1_subset_token_for_token(run: Run) -> None:
    _assert_equal(run.golden, files.golden("W1")[:NUM_GOLDEN])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 256, 512, 2048])
def test_golden_w1_whole_at_every_budget(budget: int) -> None:
    """With the buckets that the budget implies, proved before they serve."""
    made = make(budget, BucketConfig(), prove=True)
    try:
        requests = files.golden("W1")
        _assert_equal(_generate(made, requests), requests)
        assert made.runner.compiles_after_warmup == 0
    finally:
        made.close()


def _generate(assembly: Assembly, requests: list[files.Golden]) -> list[Answer]:
    prompts = [request.prompt for request in requests]
    return generate(assembly.engine, prompts, [_as_long_as(request) for request in requests])


def _as_long_as(request: files.Golden) -> SamplingParams:
    return dataclasses.replace(GREEDY, max_tokens=len(request.output))


def _assert_equal(answers: list[Answer], requests: list[files.Golden]) -> None:
    wrong = [
        number
        for number, (answer, request) in enumerate(zip(answers, requests, strict=True))
        if answer.tokens != request.output
    ]
    assert not wrong, f"{len(requests) - len(wrong)} of {len(requests)} equal; wrong: {wrong}"
