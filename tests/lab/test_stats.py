"""Statistical claims, on seeded data: how often an interval lies, and what drift does to it."""

import math

import numpy as np
import pytest
from scipy import stats as reference

from jaxserve.lab import stats

TRIALS = 2000


def measured(rng, effects, *, rounds: int, noise: float, drift: float) -> np.ndarray:
    """[round, configuration], around 100: what drifts falls on all of a round."""
    y = rng.normal(0, noise, (rounds, len(effects)))
    y += rng.normal(0, drift, (rounds, 1)) + np.asarray(effects)
    return 100 * np.exp(y)


@pytest.mark.parametrize("configs", [2, 4])
@pytest.mark.parametrize("rounds", [2, 3, 6])
def test_noise_is_called_a_difference_in_one_of_twenty_comparisons_at_most(
    configs: int, rounds: int
):
    rng = np.random.default_rng(7)
    wrong = sum(
        any(
            contrast.differs
            for contrast in stats.contrasts(
                measured(rng, [0.0] * configs, rounds=rounds, noise=0.03, drift=0.3)
            )
        )
        for _ in range(TRIALS)
    )
    assert wrong / TRIALS < 0.05 + 3 * math.sqrt(0.05 * 0.95 / TRIALS)
    assert wrong / TRIALS > 0.02  # nor so careful that nothing is ever found


def test_intervals_hold_the_true_change():
    rng = np.random.default_rng(8)
    effects = [0.0, 0.1, -0.05]
    held = sum(
        all(
            c.low <= math.expm1(effect) <= c.high
            for c, effect in zip(
                stats.contrasts(measured(rng, effects, rounds=4, noise=0.04, drift=0.2)),
                effects[1:],
                strict=True,
            )
        )
        for _ in range(TRIALS)
    )
    assert held / TRIALS > 0.95 - 3 * math.sqrt(0.05 * 0.95 / TRIALS)


def test_a_change_of_ten_percent_is_found_under_drift_of_thirty():
    rng = np.random.default_rng(9)
    found = sum(
        stats.contrasts(measured(rng, [0.0, 0.1], rounds=5, noise=0.02, drift=0.3))[0].differs
        for _ in range(TRIALS)
    )
    assert found / TRIALS > 0.95


def test_two_configurations_are_a_paired_t_test():
    data = measured(np.random.default_rng(1), [0.0, 0.02], rounds=6, noise=0.02, drift=0.1)
    (contrast,) = stats.contrasts(data)
    test = reference.ttest_rel(np.log(data[:, 1]), np.log(data[:, 0]))
    low, high = test.confidence_interval(0.95)
    assert contrast.relative
    assert (contrast.low, contrast.high) == pytest.approx((math.expm1(low), math.expm1(high)))
    assert contrast.differs == (test.pvalue < 0.05)


def test_intervals_of_means_are_student_s():
    values = [3.0, 4.0, 4.5, 6.0]
    found = stats.interval(values)
    low, high = reference.t.interval(0.95, 3, np.mean(values), reference.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_one_run_says_nothing_of_noise_and_zeros_are_compared_as_differences():
    (contrast,) = stats.contrasts([[1.0, 2.0]])
    assert not contrast.differs and contrast.change == pytest.approx(1.0)
    assert stats.interval([5.0]).high == math.inf
    (plain,) = stats.contrasts([[0.0, 0.2], [0.1, 0.31], [0.0, 0.19]])
    assert not plain.relative and plain.change == pytest.approx(0.2) and plain.differs
    (same,) = stats.contrasts([[1.0, 1.0], [2.0, 2.0]])
    assert not same.differs
