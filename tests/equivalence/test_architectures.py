"""Every option of the architecture through the real engine: biases, heads, tied head, rope."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tests.equivalence.rig import BLOCK, GREEDY, MAX_LEN, SCORED, Rig, generate
from tests.reference import files, tiny
from tests.reference.dense import Dense

LENGTHS = (5 * BLOCK + 3, 1, BLOCK, 2 * BLOCK + 1, MAX_LEN - GREEDY.max_tokens)
ONLY_SCORE = dataclasses.replace(SCORED, max_tokens=0)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_every_option_equals_the_dense_reference(make_rig: Callable[..., Rig], name: str) -> None:
    """Mixed steps of several chunks and decodes; lengths beyond the original context of 32."""
    rig = make_rig(name, budgets=(16,))
    prompts = [tiny.make_prompt(length, 7 + length) for length in LENGTHS]
    engine = rig.engine()
    rig.check(generate(engine, prompts, SCORED))
    rig.check(generate(engine, prompts, GREEDY))


@pytest.mark.parametrize("name", ["gqa_9_3", "rope_yarn", "rope_llama3", "mistral"])
def test_logprobs_equal_transformers(make_rig: Callable[..., Rig], name: str) -> None:
    """The committed logits, without the dense reference between."""
    rig = make_rig(name, budgets=(16,))
    case = files.tiny_case(name)
    prompt = case.prompts[100][:MAX_LEN]
    (answer,) = generate(rig.engine(), [prompt], ONLY_SCORE)
    assert answer.prompt_logprobs is not None and answer.tokens == []
    logits = case.logits[100][: MAX_LEN - 1].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    found = [entry.logprob for entry in answer.prompt_logprobs if entry is not None]
    expected = logprobs[np.arange(MAX_LEN - 1), prompt[1:]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["rope_dynamic", "rope_longrope"])
def test_b09_the_rope_set_never_switches(make_rig: Callable[..., Rig], name: str) -> None:
    """Generating across the original context of 32: the frequencies are those of the longest
    request served from the first token on, so all at once and step by step agree."""
    rig = make_rig(name, budgets=(16,))
    prompt = tiny.make_prompt(26, 3)
    (stepwise,) = generate(rig.engine(), [prompt])
    rig.check([stepwise])
    whole = [*prompt, *stepwise.tokens]
    (at_once,) = generate(rig.engine(), [whole], ONLY_SCORE)
    rig.check([at_once])
    case = files.tiny_case(name)
    short = Dense(case.config, case.weights(), length=32).logprobs(whole)
    assert at_once.prompt_logprobs is not None and at_once.prompt_logprobs[-1] is not None
    assert abs(at_once.prompt_logprobs[-1].logprob - short[-2, whole[-1]]) > 1e-3
