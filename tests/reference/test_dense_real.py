"""The dense reference on the weights of the default model, read without the product's loader."""

import hashlib

import numpy as np
import pytest

from jaxserve import sources
from tests.reference import files
from tests.reference.dense import Dense
from tools.reference_weights import read_gguf

SHORT = ("short_question", "one_line", "chat")


@pytest.fixture(scope="module")
def model() -> Dense:
    config, weights = read_gguf(sources.resolve(sources.DEFAULT))
    return Dense(config, weights)


def _check(model: Dense, name: str) -> None:
    prompt = files.real_prompts()[name]
    logprobs = model.logprobs(prompt.ids)
    chosen = logprobs[np.arange(len(prompt.ids) - 1), prompt.ids[1:]]
    np.testing.assert_allclose(chosen, prompt.logprobs[1:], rtol=0, atol=1e-3)
    if prompt.gaps[0] > files.NEAR_TIE:
        assert np.argmax(logprobs[-1]) == prompt.greedy[0]


@pytest.mark.parametrize("name", SHORT)
def test_prompt_logprobs_equal_transformers(model: Dense, name: str) -> None:
    _check(model, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in files.real_prompts() if name not in SHORT])
def test_prompt_logprobs_equal_transformers_on_all_prompts(model: Dense, name: str) -> None:
    _check(model, name)


def test_references_were_made_from_the_default_model() -> None:
    content = sources.resolve(sources.DEFAULT).read_bytes()
    assert hashlib.sha256(content).hexdigest() == sources.SMOLLM2.sha256 == files.real_source()
