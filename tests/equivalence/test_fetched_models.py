"""The models that are fetched by name, as they are served on a CPU by default, against transformers
on the same dequantised weights."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve import sources
from jaxserve.build import Assembly, assemble
from jaxserve.config import EngineConfig, ModelConfig, SamplingConfig
from jaxserve.request import SamplingParams
from tests.equivalence.rig import Answer, generate
from tests.reference import files

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
GEMMA = "real_gemma3"


def test_the_references_of_gemma_were_made_from_the_pinned_file() -> None:
    assert files.real_source(GEMMA) == sources.GEMMA3.sha256


@pytest.mark.parametrize("pinned", sources.PINNED.values(), ids=sources.PINNED)
def test_the_long_reference_says_what_its_perplexity_is(pinned: sources.PinnedFile) -> None:
    text = files.long_reference(pinned.sha256)
    assert len(text.ids) == len(text.logprobs) > 2000
    assert np.exp(-text.logprobs[1:].mean(dtype=np.float64)) == pytest.approx(text.perplexity)


@pytest.fixture(scope="module", params=sources.PINNED.values(), ids=sources.PINNED)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[sources.PinnedFile, Assembly]]:
    made = assemble(
        EngineConfig(
            model=ModelConfig(name=request.param.name, dtype="float32", max_len=4096),
            sampling=SamplingConfig(random=False, penalties=False),
        )
    )
    yield request.param, made
    made.close()


def _logprobs(answer: Answer) -> list[float]:
    assert answer.prompt_logprobs is not None
    return [entry.logprob for entry in answer.prompt_logprobs[1:] if entry]


@pytest.mark.slow
def test_the_long_text_has_the_perplexity_of_transformers(served) -> None:
    pinned, made = served
    expected = files.long_reference(pinned.sha256)
    assert made.tokenizer.encode(files.long_text()) == expected.ids
    scored = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    found = _logprobs(generate(made.engine, [expected.ids], [scored])[0])
    np.testing.assert_allclose(found, expected.logprobs[1:], rtol=0, atol=1e-3)
    assert np.exp(-np.mean(found)) == pytest.approx(expected.perplexity, rel=0.005)


@pytest.mark.slow
def test_prompts_of_gemma_equal_transformers(served) -> None:
    """All at once, so that steps are mixed: every log-probability, and 64 greedy ids."""
    pinned, made = served
    if pinned != sources.GEMMA3:
        pytest.skip("test_real_model.py has the default model's")
    prompts = files.real_prompts(GEMMA)
    scored = dataclasses.replace(GREEDY, prompt_logprobs=0)
    ids = [prompt.ids for prompt in prompts.values()]
    assert [made.tokenizer.encode(prompt.text) for prompt in prompts.values()] == ids
    for answer, prompt in zip(
        generate(made.engine, ids, [scored] * len(ids)), prompts.values(), strict=True
    ):
        np.testing.assert_allclose(_logprobs(answer), prompt.logprobs[1:], rtol=0, atol=1e-3)
        assert answer.tokens == prompt.greedy, prompt.text
