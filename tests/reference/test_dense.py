"""The dense reference against transformers: what it is compared with must be right itself."""

import numpy as np
import pytest

from tests.reference import files, tiny
from tests.reference.dense import Dense
from tools.make_references import checksum

LENGTHS = pytest.mark.parametrize("length", tiny.LENGTHS)
NAMES = pytest.mark.parametrize("name", tiny.CONFIGS)


@NAMES
def test_weights_are_those_the_reference_was_made_with(name: str) -> None:
    case = files.tiny_case(name)
    assert checksum(case.weights()) == case.sha256


@NAMES
@LENGTHS
def test_logits_equal_transformers(name: str, length: int) -> None:
    case = files.tiny_case(name)
    logits = Dense(case.config, case.weights()).logits(case.prompts[length])
    np.testing.assert_allclose(logits, case.logits[length], rtol=0, atol=1e-4)


@NAMES
@LENGTHS
def test_greedy_equals_transformers(name: str, length: int) -> None:
    case = files.tiny_case(name)
    expected = case.greedy[length]
    assert (
        Dense(case.config, case.weights()).greedy(case.prompts[length], len(expected)) == expected
    )


@NAMES
def test_float32_is_accurate(name: str) -> None:
    case = files.tiny_case(name)
    single, double = (
        Dense(case.config, case.weights(), dtype=dtype).logits(case.prompts[100])
        for dtype in (np.float32, np.float64)
    )
    assert single.dtype == np.float32 and double.dtype == np.float64
    np.testing.assert_allclose(single, double, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["rope_dynamic", "rope_longrope"])
def test_frequencies_follow_the_request_length_only_where_they_should(name: str) -> None:
    """B09: both variants change beyond the original context, and must be told the length of the
    request.
    """
    case = files.tiny_case(name)
    tokens = case.prompts[5]
    short, at_limit, beyond = (
        Dense(case.config, case.weights(), length=length).logits(tokens) for length in (5, 32, 33)
    )
    np.testing.assert_array_equal(short, at_limit)
    assert np.abs(short - beyond).max() > 1e-3


@pytest.mark.parametrize("window", [1, 3, 7])
def test_window_hides_what_is_further_back(window: int) -> None:
    """With one layer, a changed token changes exactly the queries that see it."""
    config = tiny.CONFIGS["mha"] | {"num_hidden_layers": 1}
    weights = tiny.make_weights(config, 0)
    model = Dense(config, weights, window=window)
    tokens = tiny.make_prompt(20, 1)
    changed = [*tokens[:6], tokens[6] ^ 1, *tokens[7:]]
    difference = np.abs(model.logits(tokens) - model.logits(changed)).max(axis=-1)
    assert np.flatnonzero(difference > 0).tolist() == list(range(6, 6 + window))


def test_soft_cap_bounds_scores() -> None:
    """A huge cap changes nothing; a tiny cap makes all scores equal, so that heads average their
    values.
    """
    config = tiny.CONFIGS["mha"]
    weights = tiny.make_weights(config, 0)
    tokens = tiny.make_prompt(20, 1)
    plain = Dense(config, weights, dtype=np.float64).logits(tokens)
    loose = Dense(config, weights, dtype=np.float64, soft_cap=1e6).logits(tokens)
    np.testing.assert_allclose(loose, plain, rtol=0, atol=1e-8)
    tight = Dense(config, weights, dtype=np.float64, soft_cap=1e-9).logits(tokens)
    flat = weights | {name: 0 * w for name, w in weights.items() if "q_proj" in name}
    averaged = Dense(config, flat, dtype=np.float64).logits(tokens)
    np.testing.assert_allclose(tight, averaged, rtol=0, atol=1e-6)
    assert np.abs(tight - plain).max() > 0.1
