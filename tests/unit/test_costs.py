"""Laws of the cost model and of its correction."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.costs import (
    GROUPS,
    MAX_CORRECTION,
    NO_STEP,
    SPAN,
    TILES,
    CostModel,
    OnlineCosts,
    StepShape,
    no_step,
    pairs,
    tile_pairs,
    turns,
)

MODEL = CostModel(
    tokens=(8, 16, 64),
    program=(0.004, 0.006, 0.02),
    rows=(4, 8),
    sampling={"greedy": (0.001, 0.002), "full": (0.005, 0.009)},
    single=1e-5,
    single_context=1e-6,
    chunk=2e-4,
    chunk_pair=1e-8,
    host=1e-3,
    host_row=1e-5,
)


def shape(**parts) -> StepShape:
    neutral = StepShape(8, 8, 0, "none", 0, 0, 0, 0)
    return neutral._replace(**parts)


@given(st.integers(0, 300), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_pairs_do_not_depend_on_how_a_prompt_is_cut(start: int, cuts: list[int]):
    at, total = start, 0
    for size in cuts:
        total += pairs(at, size)
        at += size
    assert total == pairs(start, sum(cuts)) == sum(range(start + 1, at + 1))


def test_a_prediction_is_the_sum_of_its_parts():
    step = shape(
        bucket=16, rows=8, sampler="full", singles=5, single_context=900, chunks=1, chunk_pairs=4000
    )
    assert MODEL.predict(step) == pytest.approx(
        0.006 + 0.009 + 5e-5 + 900e-6 + 2e-4 + 4000e-8, rel=1e-12
    )
    assert MODEL.predict(shape()) == 0.004
    assert MODEL.host_s(10) == pytest.approx(1.1e-3)


def test_a_sampler_without_a_program_of_its_own_costs_what_serves_it():
    assert MODEL.sampling_s("random", 4) == MODEL.sampling_s("full", 4) == 0.005
    assert MODEL.sampling_s("greedy", 6) == pytest.approx(0.0015)
    assert CostModel((8,), (1.0,)).sampling_s("greedy", 8) == 0


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_larger_program_never_counts_as_cheaper_between_and_beyond_the_measured(a: int, b: int):
    low, high = sorted((a, b))
    assert MODEL.program_s(low) <= MODEL.program_s(high)
    assert MODEL.program_s(16) == 0.006 and MODEL.program_s(40) == pytest.approx(0.013)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": ()},
        {"tokens": (16, 8)},
        {"program": (1.0,)},
        {"program": (0.0, 1.0)},
        {"program": (math.nan, 1.0)},
        {"single": -1.0},
        {"tile_pair": -1.0},
        {"host": math.inf},
        {"rows": (4,), "sampling": {"greedy": ()}},
    ],
)
def test_tables_that_cannot_be_are_refused(wrong: dict):
    with pytest.raises(ValueError):
        CostModel(**{"tokens": (8, 16), "program": (1.0, 2.0)} | wrong)


def test_a_model_that_is_far_off_is_mended_within_a_few_steps():
    costs = OnlineCosts(MODEL)
    for _ in range(10):
        step = shape(bucket=16)
        costs.observe(step, costs.predict(step), 1.6 * MODEL.predict(step))
    assert costs.factor(16) == pytest.approx(1.6, rel=0.08)
    assert costs.factor(8) < 1.1


def test_a_lasting_change_is_learnt_and_a_pause_is_not():
    costs, rng = OnlineCosts(MODEL), random.Random(5)
    truth = {8: 1.4, 16: 1.0, 64: 0.8}
    for _ in range(2000):
        step = shape(bucket=rng.choice((8, 16, 64)))
        real = MODEL.predict(step) * truth[step.bucket] * math.exp(rng.gauss(0, 0.02))
        if rng.random() < 0.01:
            real *= 50  # the machine paused
        costs.observe(step, costs.predict(step), real)
    for bucket, factor in truth.items():
        assert costs.factor(bucket) == pytest.approx(factor, rel=0.05)
    assert costs.programs((8, 16, 64)) == {
        size: MODEL.program_s(size) * costs.factor(size) for size in (8, 16, 64)
    }


@settings(derandomize=True)
@given(st.lists(st.tuples(st.sampled_from((8, 16)), st.floats(0, 1e9)), max_size=400))
def test_a_correction_is_bounded(steps: list[tuple[int, float]]):
    costs = OnlineCosts(MODEL)
    for bucket, seconds in steps:
        step = shape(bucket=bucket)
        costs.observe(step, costs.predict(step), seconds)
    for bucket in (8, 16, 64):
        assert abs(math.log(costs.factor(bucket))) <= MAX_CORRECTION


def groups_of(contexts: list[int]) -> list[tuple[int, list[int]]]:
    """Rows that a group has room for, and the contexts that are in it, longest first."""
    full, small = GROUPS
    rows, found = sorted(contexts, reverse=True), []
    while rows:
        size = full if len(rows) > full // 2 else small
        found.append((size, rows[:size]))
        rows = rows[size:]
    return found


@given(st.lists(st.integers(1, 5000), max_size=70))
def test_turns_are_those_of_groups_sorted_by_context(contexts: list[int]):
    walked = [(size, -(-group[0] // SPAN)) for size, group in groups_of(contexts)]
    count, rows = sum(n for _, n in walked), sum(size * n for size, n in walked)
    assert turns(np.array(contexts, np.int32)) == (count, rows)


@given(st.integers(0, 5000), st.integers(2, 2000))
def test_whole_tiles_hold_every_pair(start: int, tokens: int):
    filled = tile_pairs(start, tokens)
    assert pairs(start, tokens) <= filled
    (large, wide), *_, (small, _) = TILES
    assert filled <= (tokens + large) * (start + tokens + wide)
    if tokens <= small:
        assert filled == small * -(-(start + tokens) // SPAN) * SPAN


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 200))
def test_a_token_sees_no_further_than_its_window(start: int, tokens: int, window: int):
    seen = sum(min(at + 1, window) for at in range(start, start + tokens))
    assert pairs(start, tokens, window) == seen
    assert pairs(start, tokens, start + tokens) == pairs(start, tokens)


@given(st.lists(st.integers(1, 2000), max_size=40), st.integers(1, 1500))
def test_turns_begin_with_the_window_of_the_shortest_of_a_group(contexts: list[int], window: int):
    count = rows = 0
    for size, group in groups_of(contexts):
        walked = len(range(max(0, group[-1] - window) // SPAN, -(-group[0] // SPAN)))
        count, rows = count + walked, rows + size * walked
    assert turns(np.array(contexts, np.int32), window) == (count, rows)


@given(st.integers(0, 3000), st.integers(2, 900), st.integers(1, 2000))
def test_windowed_tiles_hold_every_pair_that_is_seen(start: int, tokens: int, window: int):
    filled = tile_pairs(start, tokens, window)
    assert pairs(start, tokens, window) <= filled <= tile_pairs(start, tokens)
    (large, wide), *_ = TILES
    assert filled <= (tokens + large) * (window + large + 2 * wide)


@pytest.mark.parametrize("term", ["single_context", "chunk_pair", "turn", "turn_row", "tile_pair"])
def test_costs_stop_growing_at_the_window(term: str):
    model, window = CostModel((64,), (0.01,), **{term: 1e-6}), 256

    def seconds(windows: tuple[int | None, ...], context: int) -> float:
        shape = no_step(windows).with_singles(np.full(20, context, np.int32))
        return model.attention_s(shape.with_chunk(context, 40)._replace(bucket=64))

    far, further = 1024, 8192  # where turns begin alike
    assert seconds((window,), 64) < seconds((window,), window) <= seconds((window,), far)
    assert seconds((window,), far) == seconds((window,), further)
    assert seconds((None,), far) < 0.2 * seconds((None,), further)
    mixed = (2 * seconds((window,), further) + seconds((None,), further)) / 3
    assert seconds((window, None, window), further) == pytest.approx(mixed)


def test_a_model_without_windows_reads_whole_contexts():
    assert no_step((None,)) == no_step((None, None)) == NO_STEP
    same = no_step((5000, None))  # a window that nobody reaches
    for empty in (NO_STEP, same):
        shape = empty.with_singles(np.array([7, 900], np.int32)).with_chunk(1000, 70)
        assert (shape.single_context, shape.chunk_pairs) == (907, 70 * 1000 + 35 * 71)
        assert (shape.single_turns, shape.single_turn_rows) == (8, 32)
        assert shape.tile_pairs == 64 * (1152 + 1152)


def test_a_group_has_no_more_rows_than_the_program():
    alone = NO_STEP.with_singles(np.array([300], np.int32))
    assert [alone._replace(bucket=size).turn_rows for size in (1, 2, 4, 64)] == [3, 6, 12, 12]


def test_a_shape_is_the_sum_of_its_rows():
    singles = np.array([5, 300, 1], np.int32)
    whole = NO_STEP.with_singles(singles).with_chunk(10, 20).with_chunk(6, 1)
    assert (whole.tokens, whole.singles, whole.chunks) == (24, 4, 1)
    assert whole.single_context == 313 and whole.chunk_pairs == pairs(10, 20)
    assert NO_STEP.with_chunk(6, 1) == NO_STEP.with_singles(np.array([7], np.int32))
