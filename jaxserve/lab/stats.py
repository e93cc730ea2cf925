"""Intervals and contrasts of repeated measurements.

Runs of all configurations are interleaved in rounds, so that what drifts (temperature, neighbours)
falls on all alike.  The model is that of a blocked experiment,

    y[config, round] = mean + effect[config] + effect[round] + noise,

on logarithms where all values are positive: differences are then ratios.  The noise is estimated
from what configuration and round leave, (C - 1) (R - 1) degrees of freedom, and contrasts with the
first configuration get Student's t, with Bonferroni's correction for their number: all of them hold
together at the stated confidence.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it; infinite where one run says nothing of noise."""

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Contrast:
    """A configuration against the first.  `relative`: a ratio minus 1, else a plain difference."""

    change: float
    low: float
    high: float
    relative: bool

    @property
    def differs(self) -> bool:
        """The interval does not hold 0: more than noise."""
        return self.low > 0 or self.high < 0


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Of the mean of repeats."""
    data = np.asarray(values, float)
    mean, count = float(data.mean()), len(data)
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    half = _t(count - 1, 1 - confidence) * float(data.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def contrasts(rounds: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> list[Contrast]:
    """Of every configuration but the first; `rounds[r][c]`: value of configuration c in round r."""
    data = np.asarray(rounds, float)
    count, configs = data.shape
    if configs < 2:
        return []
    relative = bool((data > 0).all())
    y = np.log(data) if relative else data
    effects = y.mean(axis=0)
    changes = effects[1:] - effects[0]
    if count < 2:
        half = math.inf
    else:
        rest = y - effects[None, :] - y.mean(axis=1)[:, None] + y.mean()
        freedom = (count - 1) * (configs - 1)
        noise = math.sqrt(float((rest**2).sum()) / freedom)
        half = _t(freedom, (1 - confidence) / (configs - 1)) * noise * math.sqrt(2 / count)
    found = [(float(c), float(c) - half, float(c) + half) for c in changes]
    if relative:
        found = [(math.expm1(c), math.expm1(low), _expm1(high)) for c, low, high in found]
    return [Contrast(*part, relative) for part in found]


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf


def _t(freedom: int, alpha: float) -> float:
    """Two-sided quantile."""
    return float(stdtrit(freedom, 1 - alpha / 2))
