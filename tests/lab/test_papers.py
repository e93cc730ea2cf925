"""What papers on scheduling found, in shape, on step times that were published (`lab/tables`).

Sarathi-Serve is arXiv 2403.02310; lengths like those of its conversations, its strict limit of
100 ms for a 7B model on one A100.
"""

import functools
from typing import Any

import pytest

from jaxserve.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxserve.lab import arrivals, baselines, cost_table, simulate, subject
from jaxserve.lab.arrivals import Arrival

STRICT_MS = 100
WHOLE = 8192  # a budget that cuts no prompt
COSTS = subject.read_costs(subject.shipped("a100-llama3-8b"))


def chats(rate: float, count: int) -> list[Arrival]:
    prompt, output = arrivals.lengths("1730/5696", 7000), arrivals.lengths("415/834", 1000)
    return arrivals.generated(count, rate, prompt, output, seed=1)


@functools.cache
def run(kind: str, budget: int, rate: float, count: int = 120, **rules: Any) -> dict[str, Any]:
    config = EngineConfig(
        cache=CacheConfig(prefix_caching=False),
        scheduler=SchedulerConfig(token_budget=budget, max_seqs=128, **rules),
    )
    assert COSTS.facts is not None
    played = simulate.play(
        subject.resolved(config, COSTS.facts),
        COSTS.model,
        chats(rate, count),
        make_engine=baselines.ENGINES[kind],
    )
    return simulate.report(played, 2000, None)


def holds(report: dict[str, Any]) -> bool:
    """The paper's capacity: P99 between tokens within the limit, and no queue that builds up."""
    return report["itl_ms"]["p99"] <= STRICT_MS and report["queue_s"]["p50"] <= 2.0


def test_the_strict_limit_is_held_at_two_and_a_half_times_the_load_of_prefill_first():
    broken, held = 1.4, 3.5
    assert held >= 2.5 * broken
    assert not holds(run("prefill-first", WHOLE, broken))
    assert holds(run("production", 512, held))


def test_a_larger_budget_raises_the_gaps_and_lowers_the_first_token():
    found = [run("production", budget, 4.0) for budget in (512, 1024, 2048)]
    gaps = [report["itl_ms"]["p99"] for report in found]
    firsts = [report["ttft_s"]["p50"] for report in found]
    assert gaps[1] > 1.4 * gaps[0] and gaps[2] > 1.4 * gaps[1]
    assert firsts[1] < 0.95 * firsts[0] and firsts[2] < 0.95 * firsts[1]


def test_chunks_and_mixing_are_each_half_of_it():
    both = run("production", 1024, 4.0)
    chunks, mixing = run("unmixed", 1024, 4.0), run("production", WHOLE, 4.0)
    first, gap = (lambda report: report["ttft_s"]["p50"]), (lambda report: report["itl_ms"]["p99"])
    assert first(chunks) > 1.15 * first(both) and first(chunks) > 1.5 * first(mixing)
    assert gap(mixing) > 2 * gap(both)
    assert gap(chunks) > 1.05 * gap(both)


def test_under_overload_a_bounded_queue_keeps_serving_in_time():
    """At twice what can be served, goodput within 2 s to the first token."""
    fits, over = run("production", 1024, 4.0), run("production", 1024, 10.0, 400)
    bounded = run("production", 1024, 10.0, 400, max_waiting=6)
    rate = [report["goodput"]["requests_per_s"] for report in (fits, over, bounded)]
    assert over["refused"] == 0 and rate[1] < 0.4 * rate[0]
    assert bounded["refused"] > 100 and rate[2] > 0.8 * rate[0]
    assert bounded["ttft_s"]["p99"] < 4.0 < over["ttft_s"]["p50"]


@pytest.mark.parametrize("name", subject.shipped_names())
def test_shipped_tables_say_where_they_are_from(name: str):
    table = cost_table.load(subject.shipped(name))
    assert "arXiv" in table.source and table.device and table.model
    assert list(table.costs.program) == sorted(table.costs.program)
    assert subject.read_costs(subject.shipped(name)).facts is not None
