"""The best bucket set, against brute force over all sets, under the scheduler's own snapping."""

import collections
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.lab import bucket_search, demand
from jaxserve.lab.bucket_search import Search, seconds, step_seconds
from jaxserve.lab.demand import Demand
from jaxserve.scheduler import snap
from jaxserve.scheduler.snap import CostTable
from tests.lab.test_record import busy


@st.composite
def problems(draw: st.DrawFn):
    """Demands, candidates, a cost: affine, with plateaus, or anything that ascends."""
    budget = draw(st.sampled_from([16, 24, 40]))
    below = draw(st.lists(st.integers(1, budget - 1), min_size=2, max_size=6, unique=True))
    demands: collections.Counter[Demand] = collections.Counter()
    for _ in range(draw(st.integers(1, 25))):
        tokens = draw(st.integers(1, budget))
        last_chunk = draw(st.integers(0, tokens))
        decodes = draw(st.integers(0, tokens - last_chunk))
        demands[Demand(tokens, last_chunk, decodes)] += draw(st.integers(1, 9))
    start, slope = draw(st.floats(0.01, 5)), draw(st.floats(0, 1))
    jumps = draw(st.lists(st.floats(0, 4), min_size=budget + 1, max_size=budget + 1))
    rough = draw(st.booleans())
    return demands, (*sorted(below), budget), lambda n: start + slope * n + rough * jumps[n]


def brute_force(
    demands: dict[Demand, int], candidates: tuple[int, ...], cost: Callable[[int], float], most: int
) -> dict[int, float]:
    """Least seconds of at most 1, ..., `most` buckets."""
    grown = list(itertools.accumulate((cost(size) for size in candidates), max))
    price = dict(zip(candidates, grown, strict=True))
    least: dict[int, float] = {}
    for number in range(1, most + 1):
        totals = []
        for below in itertools.combinations(candidates[:-1], number - 1):
            sizes = (*below, candidates[-1])
            table = CostTable(sizes, tuple(price[size] for size in sizes), measured=True)
            totals.append(seconds(demands, table))
        least[number] = min([*totals, least.get(number - 1, float("inf"))])
    return least


@settings(derandomize=True, deadline=None, max_examples=150)
@given(problems())
def test_no_set_is_better_than_the_one_found(problem):
    demands, candidates, cost = problem
    found = Search(demands, candidates, cost).best_sets(len(candidates))
    least = brute_force(demands, candidates, cost, len(candidates))
    assert len(found) == len(candidates)
    for number, best in enumerate(found, 1):
        assert best.proven and len(best.sizes) <= number and best.sizes[-1] == candidates[-1]
        assert best.seconds == pytest.approx(least[number], rel=1e-9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(problems(), st.integers(0, 60))
def test_the_best_of_the_allowed_sets_is_found(problem, limit: int):
    demands, candidates, cost = problem

    def allowed(sizes) -> bool:  # as compile seconds: each costs its own
        return sum(1 + size % 7 for size in sizes) <= limit

    sets = [
        (*below, candidates[-1])
        for count in range(len(candidates))
        for below in itertools.combinations(candidates[:-1], count)
    ]
    grown = list(itertools.accumulate((cost(size) for size in candidates), max))
    price = dict(zip(candidates, grown, strict=True))
    totals = [
        seconds(demands, CostTable(s, tuple(price[x] for x in s), measured=True))
        for s in sets
        if allowed(s)
    ]
    found = Search(demands, candidates, cost).best_sets(len(candidates), allowed)
    assert bool(found) == bool(totals)
    if totals:
        assert found[-1].seconds == pytest.approx(min(totals), rel=1e-9)
        assert all(allowed(best.sizes) for best in found)


def test_a_search_that_is_cut_short_says_so_and_names_a_bound(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(3)
    demands: collections.Counter[Demand] = collections.Counter()
    for _ in range(200):
        tokens = rng.randint(2, 256)
        last_chunk = rng.randint(1, tokens - 1)
        demands[Demand(tokens, last_chunk, rng.randint(1, tokens - last_chunk))] += 1
    candidates = tuple(range(8, 257, 8))

    def cost(size: int) -> float:
        return 5 + size

    whole = Search(demands, candidates, cost).best_sets(4)[-1]
    monkeypatch.setattr(bucket_search, "MOST_SETS", 2)
    short = Search(demands, candidates, cost).best_sets(4)[-1]
    assert whole.proven and not short.proven
    assert short.bound <= whole.seconds <= short.seconds


def test_a_step_costs_what_the_scheduler_believes_it_costs():
    table = CostTable((8, 16, 64), (1.0, 1.5, 4.0), measured=True)
    assert step_seconds(Demand(20, 0, 20), table) == 4.0  # decodes are never cut
    assert snap.tokens_to_cut(20, 10, 10, table) == 4
    assert step_seconds(Demand(20, 10, 10), table) == 1.5  # 14 decodes fit 16 as well as 10 do
    assert step_seconds(Demand(20, 10, 4), table) == 1.5  # 8 as well as 4
    assert step_seconds(Demand(20, 20, 0), table) == 1.5 + 1.0  # the rest is a step of its own
    assert step_seconds(Demand(60, 60, 0), table) == 4.0


def test_demand_conserves_tokens_and_undoes_the_cuts(tmp_path):
    rig, found = busy(tmp_path / "t")
    budget = rig.config.scheduler.token_budget
    demands = demand.of_steps(found.steps, budget)
    assert sum(step.cut for step in found.steps) > 0
    computed = sum(step.tokens for step in found.steps)
    assert sum(d.tokens * count for d, count in demands.items()) == computed
    for d in demands:
        assert d.last_chunk + d.decodes <= d.tokens <= budget
    # In the buckets of the recorded run the demands come to the steps that were recorded.
    table = rig.engine.scheduler.costs
    again = seconds(demands, table)
    assert again == pytest.approx(sum(table.cost(s.tokens) for s in found.steps), rel=0.05)
