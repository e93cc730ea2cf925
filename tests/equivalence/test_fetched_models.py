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
