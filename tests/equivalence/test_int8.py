"""Int8 weights through the whole engine, against the dense reference on the rounded weights."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.runner import warmup
from tests.equivalence.rig import BLOCK, SCORED, Rig, generate
from tests.reference import tiny

LENGTHS = (5 * BLOCK + 3, 1, BLOCK, 2 * BLOCK + 1)
OFF = 1e-3  # of log-probabilities: activations have 16 bits where rows are few


@pytest.mark.parametrize(("name", "layers"), [("gqa_9_3", "calls"), ("mistral", "loop")])
def test_answers_are_those_of_the_rounded_weights(
    make_rig: Callable[..., Rig], name: str, layers: str
) -> None:
    """Chunks in the bucket whose weights are converted, decodes in the one of integers."""
    rig = make_rig(name, layers=layers, quantize="int8")
    prompts = [tiny.make_prompt(length, 7 + length) for length in LENGTHS]
    for answer, prompt in zip(generate(rig.engine(), prompts, SCORED), prompts, strict=True):
        assert answer.tokens == rig.reference.greedy(prompt, len(answer.tokens))
        expected = rig.reference.dense.logprobs([*prompt, *answer.tokens])
        entries = [*(answer.prompt_logprobs or ())[1:], *answer.logprobs]
        found = [entry.logprob for entry in entries if entry]
        wanted = expected[np.arange(len(found)), [*prompt, *answer.tokens][1:]]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=OFF)
    assert warmup.prove(rig.runner) < 2e-3
    assert rig.runner.compiles_after_warmup == 0
