"""The dense reference against transformers itself, on fresh random weights; needs torch (see
make_references.py).
"""

import numpy as np
import pytest

from tests.reference import tiny
from tests.reference.dense import Dense
from tools.make_references import (
    build,
    forward,
    greedy_with_cache,
    greedy_without_cache,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _needs_torch() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_equal_live(name: str, seed: int) -> None:
    config = tiny.CONFIGS[name]
    weights = tiny.make_weights(config, seed)
    model = build(config, weights)
    for length in (1, 31, 32, 33, 250):
        tokens = tiny.make_prompt(length, seed + length)
        np.testing.assert_allclose(
            Dense(config, weights).logits(tokens), forward(model, tokens), rtol=0, atol=2e-4
        )


@pytest.mark.parametrize("window", [1, 8, 40])
def test_window_equals_live(window: int) -> None:
    config = tiny.CONFIGS["mistral"] | {"sliding_window": window}
    weights = tiny.make_weights(config, 5)
    tokens = tiny.make_prompt(60, 5)
    dense = Dense(config, weights, window=window).logits(tokens)
    np.testing.assert_allclose(dense, forward(build(config, weights), tokens), rtol=0, atol=1e-4)


def test_cached_greedy_equals_uncached() -> None:
    """The references of the real model come from transformers with its cache."""
    config = tiny.CONFIGS["gqa_9_3"]
    model = build(config, tiny.make_weights(config, 3))
    prompt = tiny.make_prompt(20, 3)
    cached, gaps = greedy_with_cache(model, prompt, 30)
    plain, expected_gaps = greedy_without_cache(model, prompt, 30)
    assert cached == plain
    np.testing.assert_allclose(gaps, expected_gaps, rtol=0, atol=1e-4)
