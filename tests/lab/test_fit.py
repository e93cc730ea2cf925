"""The fit finds the costs that made the data, under noise and pauses of the machine, and says how
far it is off."""

import dataclasses
import random

import numpy as np
import pytest

from jaxserve.costs import CostModel, StepShape, no_step
from jaxserve.kv.groups import FULL, Windows
from jaxserve.lab import fit

SIZES, ROWS = (8, 16, 64, 256), (8, 32)
TRUTH = CostModel(
    SIZES,
    (0.006, 0.007, 0.017, 0.06),
    rows=ROWS,
    sampling={"greedy": (0.002, 0.004), "full": (0.005, 0.012)},
    single=2e-5,
    turn_row=2e-5,
    chunk=1e-4,
    tile_pair=2e-9,
)


def shapes(count: int, seed: int, windows: Windows = FULL) -> list[StepShape]:
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        rows = rng.choice([0, rng.randint(1, 32)])
        contexts = np.array([rng.randint(1, 3000) for _ in range(rows)], np.int32)
        shape = no_step(windows).with_singles(contexts)
        for _ in range(rng.randint(0, 2)):
            room = SIZES[-1] - shape.tokens
            shape = shape.with_chunk(rng.choice([0, rng.randint(0, 3000)]), rng.randint(2, room))
            if SIZES[-1] - shape.tokens < 2:
                break
        if not shape.tokens:
            continue
        bucket = next(size for size in SIZES if size >= shape.tokens)
        sampled = next((r for r in ROWS if r >= rows), 32) if rows else 0
        kind = rng.choice(["greedy", "full"]) if rows else "none"
        found.append(shape._replace(bucket=bucket, rows=sampled, sampler=kind))
    return found


def test_costs_without_noise_are_found_again():
    known = shapes(200, 1)
    found = fit.fit(known, [TRUTH.predict(shape) for shape in known])
    for shape in shapes(100, 2):
        assert found.predict(shape) == pytest.approx(TRUTH.predict(shape), rel=1e-4)
    assert found.program == pytest.approx(TRUTH.program, rel=1e-3)
    assert found.single_context == pytest.approx(0, abs=1e-9)


def test_layers_with_windows_are_fitted_by_what_they_see():
    windows, costly = (256, 256, None), dataclasses.replace(TRUTH, turn_row=2e-4, tile_pair=2e-8)
    seconds = [costly.predict(shape) for shape in shapes(200, 8, windows)]
    fresh = shapes(100, 9, windows)
    truth = [costly.predict(shape) for shape in fresh]
    found = fit.fit(shapes(200, 8, windows), seconds)
    assert fit.errors([found.predict(shape) for shape in fresh], truth).p95 < 1e-3
    blind = fit.fit(shapes(200, 8), seconds)  # as if every layer read whole contexts
    off = fit.errors([blind.predict(shape) for shape in shapes(100, 9)], truth)
    assert off.p95 > 0.05


def test_noise_and_pauses_leave_a_model_that_predicts():
    rng = random.Random(3)
    known = shapes(120, 4)
    seconds = [TRUTH.predict(shape) * np.exp(rng.gauss(0, 0.03)) for shape in known]
    paused = [s * (6 if rng.random() < 0.08 else 1) for s in seconds]
    found = fit.fit(known, paused)
    fresh = shapes(200, 5)
    off = fit.errors([found.predict(s) for s in fresh], [TRUTH.predict(s) for s in fresh])
    assert off.median < 0.02 and off.p95 < 0.06


def test_no_cost_is_below_zero_whatever_the_data():
    rng = random.Random(6)
    for seed in range(20):
        known = shapes(40, seed)
        found = fit.fit(known, [rng.uniform(1e-4, 1.0) for _ in known])
        numbers = [*found.program, *(x for s in found.sampling.values() for x in s)]
        terms = [getattr(found, name) for name in fit.TERMS]
        assert all(x >= 0 for x in [*numbers, *terms])


def test_a_row_bucket_that_was_never_sampled_lies_between_its_neighbours():
    known = [s for s in shapes(300, 7) if (s.sampler, s.rows) != ("full", 32)]
    assert {(s.sampler, s.rows) for s in known} >= {("greedy", 32), ("full", 8)}
    found = fit.fit(known, [TRUTH.predict(shape) for shape in known])
    assert found.sampling["full"] == pytest.approx((0.005, 0.005), rel=1e-2)


def test_what_takes_no_time_cannot_be_fitted():
    with pytest.raises(ValueError):
        fit.fit([], [])
    with pytest.raises(ValueError):
        fit.fit(shapes(1, 1), [0.0])
    with pytest.raises(ValueError):
        fit.errors([], [])


def test_errors_are_shares_of_what_was_measured():
    found = fit.errors([1.1, 0.9, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    assert found.median == pytest.approx(0.1) and found.steps == 4
    assert 0.1 < found.p95 <= 1.0


def test_host_time_has_a_part_a_step_and_a_part_a_row():
    rows = [1, 4, 16, 64]
    found = fit.host(rows, [1e-3 + 2e-5 * row for row in rows])
    assert found == pytest.approx((1e-3, 2e-5), rel=1e-6)
