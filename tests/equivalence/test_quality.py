"""The check that decides whether a data type may be served: its figures; damage fails it."""

import copy
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.build import Assembly
from tests.equivalence.rig import Rig
from tests.reference import tiny
from tools import check_quality
from tools.check_quality import Figures, Subject, compare, failures, measure, summary


def compared(reference: np.ndarray, other: np.ndarray, tokens: list[int]) -> Figures:
    return summary(compare(reference.astype(np.float32), other.astype(np.float32), tokens))


def test_figures_of_two_tokens_by_hand() -> None:
    """p = (3/4, 1/4) against q = (1/2, 1/2), then p = (1/4, 3/4) against q = (3/4, 1/4)."""
    p = np.log([[3, 1], [1, 3]]) - np.log(4)
    q = np.log([[2, 2], [3, 1]]) - np.log(4)
    found = compared(p + 5, q - 3, [0, 1])  # what is added to all logits means nothing
    kl = [0.75 * np.log(1.5) + 0.25 * np.log(0.5), 0.5 * np.log(3)]
    assert found.positions == 2
    assert found.mean_kl == pytest.approx(np.mean(kl), rel=1e-5)
    assert found.max_kl == pytest.approx(max(kl), rel=1e-5)
    assert found.perplexity_ratio == pytest.approx(np.sqrt(0.75 * 0.75 / (0.5 * 0.25)), rel=1e-5)
    assert found.perplexity == pytest.approx(np.sqrt(1 / (0.5 * 0.25)), rel=1e-5)
    assert found.rms_dp == pytest.approx(np.sqrt((0.25**2 + 0.5**2) / 2), rel=1e-5)
    assert found.agreement == 0.5
    assert found.widest_flip == pytest.approx(np.log(3), rel=1e-5)


def test_the_same_logits_are_within_any_limits() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (200, 50))
    found = compared(logits, logits, [0] * 200)
    assert (found.max_kl, found.perplexity_ratio, found.agreement) == (0, 1, 1)
    assert failures(found, check_quality.Limits(0, 0, 0, 0, 1, 0)) == []


def test_one_token_in_thousands_is_not_hidden_by_the_mean() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4000, 10))
    logits[0, :2] = 20, 19
    other = logits.copy()
    other[0, :2] = 19, 20
    found = compared(logits, other, [0] * 4000)
    assert found.mean_kl < check_quality.LIMITS.mean_kl
    assert [line.split()[0] for line in failures(found)] == ["max_kl", "widest_flip"]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_is_out_of_bounds() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (10, 10))
    other = logits.copy()
    other[3, 4] = np.nan
    assert "mean_kl" in " ".join(failures(compared(logits, other, [0] * 10)))


# -- a model, whole and damaged ------------------------------------------------------------------


def rounded(weights: dict, bits: int) -> dict:
    """Every value with `bits` binary places of its mantissa; float16 has 10, bfloat16 7."""

    def cut(array: jax.Array) -> jax.Array:
        fraction, exponent = jnp.frexp(array)
        return jnp.ldexp(jnp.round(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)

    return jax.tree.map(cut, weights)


def one_layer_without_mlp(weights: dict) -> dict:
    def cut(path: tuple, array: jax.Array) -> jax.Array:
        return array.at[0].set(0) if "down" in jax.tree_util.keystr(path) else array

    return jax.tree_util.tree_map_with_path(cut, weights)


@pytest.fixture(scope="module")
def whole(make_rig: Callable[..., Rig]) -> Assembly:
    return make_rig("mha").assembly


def against_itself(whole: Assembly, damage: Callable[[dict], dict]) -> Figures:
    """The same programs with other weights."""
    runner = copy.copy(whole.runner)
    runner.weights, runner.state = damage(runner.weights), runner.step.init_state()
    other = Subject(dataclasses.replace(whole, runner=runner))
    texts = [tiny.make_prompt(length, length) for length in (5, 9, 17, 20)]
    document = [token for text in texts for token in text]
    return measure(Subject(whole), other, texts, document, length=12)["all"]


def test_weights_rounded_as_in_float16_are_within_the_limits(whole: Assembly) -> None:
    found = against_itself(whole, lambda weights: rounded(weights, 10))
    assert found.positions == 4 * 11 + 51 - 4 + 4 + 50
    assert 0 < found.mean_kl and failures(found) == []


@pytest.mark.parametrize("damage", [lambda w: rounded(w, 2), one_layer_without_mlp])
def test_a_damaged_model_is_not(whole: Assembly, damage: Callable[[dict], dict]) -> None:
    found = against_itself(whole, damage)
    assert "mean_kl" in " ".join(failures(found)), found


def test_logits_are_read_where_layers_are_calls(make_rig: Callable[..., Rig]) -> None:
    """And are checked against what was served, by `logits` itself."""
    made = make_rig("gqa_9_3", budgets=(16,), layers="calls").assembly
    logits = np.concatenate(list(Subject(made).logits(tiny.make_prompt(20, 1))))
    assert logits.shape == (19, made.runner.step.vocab_size)
    assert np.isfinite(logits).all() and len(np.unique(logits[:, 0])) == 19


def test_no_more_logits_are_made_at_a_time_than_a_step_makes(whole: Assembly) -> None:
    """All of a document, with the vocabulary of Gemma, are more than the memory."""
    head, length = whole.runner.manifest.get("head", max(whole.config.buckets.rows)), 60
    pieces = Subject(whole).logits(tiny.make_prompt(length, 1))
    sizes = [len(next(pieces))]
    before = head.uses
    for piece in pieces:
        assert head.uses == (before := before + 1)
        sizes.append(len(piece))
    assert max(sizes) <= max(whole.config.buckets.rows) < sum(sizes) == length - 1


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "auto"), ("float32", "bfloat16")])
def test_the_default_model_is_the_same_in(dtype: str, kv_dtype: str) -> None:
    found = check_quality.check(check_quality.ModelConfig(dtype=dtype), kv_dtype)
    assert failures(found["all"]) == []
