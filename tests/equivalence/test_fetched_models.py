"""The models that are fetched by name, as they are served on a CPU by default, against transformers
on the same dequantised weights."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from jaxserve import sources
from jaxserve.build import Assembly, assemble
from jaxserve.config import EngineConfig, ModelConfig, SamplingConfig
from jaxserve.request import SamplingParams
from tests.equivalence.rig import Answer, generate
from tests.reference import files

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SCORED = dataclasses.replace(GREEDY, prompt_logprobs=0)
STEMS = {sources.SMOLLM2.name: "real", sources.GEMMA3.name: "real_gemma3"}


@pytest.mark.parametrize("pinned", sources.PINNED.values(), ids=sources.PINNED)
def test_the_long_reference_says_what_its_perplexity_is(pinned: sources.PinnedFile) -> None:
    text = files.long_reference(pinned.sha256)
    assert len(text.ids) == len(text.logprobs) > 2000
    assert np.exp(-text.logprobs[1:].mean(dtype=np.float64)) == pytest.approx(text.perplexity)


@pytest.mark.parametrize("pinned", sources.PINNED.values(), ids=sources.PINNED)
def test_the_prompts_references_are_of_the_pinned_file(pinned: sources.PinnedFile) -> None:
    stem = STEMS[pinned.name]
    assert files.real_source(stem) == pinned.sha256
    prompts = files.real_prompts(stem)
    assert prompts.keys() == files.real_prompts().keys()
    for prompt in prompts.values():
        assert len(prompt.ids) == len(prompt.logprobs)
        assert len(prompt.greedy) == len(prompt.gaps) == GREEDY.max_tokens


class Served(NamedTuple):
    pinned: sources.PinnedFile
    assembly: Assembly


@pytest.fixture(scope="module", params=sources.PINNED.values(), ids=sources.PINNED)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = assemble(
        EngineConfig(
            model=ModelConfig(name=request.param.name, dtype="float32", max_len=4096),
            sampling=SamplingConfig(random=False, penalties=False),
        )
    )
    yield Served(request.param, made)
    made.close()


def _logprobs(answer: Answer) -> list[float]:
    assert answer.prompt_logprobs is not None
    return [entry.logprob for entry in answer.prompt_logprobs[1:] if entry]


@pytest.mark.slow
def test_the_long_text_has_the_perplexity_of_transformers(served: Served) -> None:
    expected = files.long_reference(served.pinned.sha256)
    assert served.assembly.tokenizer.encode(files.long_text()) == expected.ids
    scored = dataclasses.replace(SCORED, max_tokens=1)
    found = _logprobs(generate(served.assembly.engine, [expected.ids], [scored])[0])
    np.testing.assert_allclose(found, expected.logprobs[1:], rtol=0, atol=1e-3)
    assert np.exp(-np.mean(found)) == pytest.approx(expected.perplexity, rel=0.005)


@pytest.mark.slow
def test_twenty_prompts_are_scored_and_answered_as_by_transformers(served: Served) -> None:
    """All at once, so that every step is mixed; every prompt is looked at before any fails."""
    prompts = files.real_prompts(STEMS[served.pinned.name])
    found = generate(served.assembly.engine, [prompt.ids for prompt in prompts.values()], SCORED)
    wrong = []
    for (name, prompt), answer in zip(prompts.items(), found, strict=True):
        assert served.assembly.tokenizer.encode(prompt.text) == prompt.ids
        off = np.abs(np.array(_logprobs(answer)) - prompt.logprobs[1:]).max()
        if not off <= 1e-3:
            wrong.append(f"{name}: a log-probability is off by {off:.2g}")
        pairs = enumerate(zip(answer.tokens, prompt.greedy, strict=True))
        place = next((i for i, (token, expected) in pairs if token != expected), None)
        if place is not None:
            lead = prompt.gaps[place]
            wrong.append(f"{name}: id {place} differs, where the best logit leads by {lead:.2g}")
    assert not wrong, "\n".join(wrong)
