"""What papers on scheduling found, in shape, on step times that were published (`lab/tables`).

Sarathi-Serve is arXiv 2403.02310; lengths like those of its conversations, its strict limit of
100 ms for a 7B model on one A100.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.config import CacheConfig, EngineConfig, SchedulerConfig, SloConfig
from jaxserve.engine import Engine
from jaxserve.lab import arrivals, baselines, cost_table, simulate, subject
from jaxserve.lab.arrivals import Arrival

STRICT_MS = 100
WHOLE = 8192  # a budget that cuts no prompt
COSTS = subject.read_costs(subject.shipped("a100-llama3-8b"))


def chats(rate: float, count: int) -> list[Arrival]:
    prompt, output = arrivals.lengths("1730/5696", 7000), arrivals.lengths("415/834", 1000)
    return arrivals.generated(count, rate, prompt, output, seed=1)


def on(
    make_engine: Callable[..., Engine],
    offered: list[Arrival],
    rules: dict[str, Any],
    *,
    ttft_ms: float = 0.0,
    tpot_ms: float = 0.0,
) -> dict[str, Any]:
    config = EngineConfig(
        cache=CacheConfig(prefix_caching=False),
        scheduler=SchedulerConfig(max_seqs=128, stall_limit=0, **rules),  # not of the papers
        slo=SloConfig(ttft_ms=1000, tpot_ms=tpot_ms),
    )
    assert COSTS.facts is not None
    made = subject.resolved(config, COSTS.facts)
    played = simulate.play(made, COSTS.model, offered, make_engine=make_engine)
    return simulate.report(played, ttft_ms or None, tpot_ms or None)


@functools.cache
def run(kind: str, budget: int, rate: float, count: int = 120, **rules: Any) -> dict[str, Any]:
    rules["token_budget"] = budget
    return on(baselines.ENGINES[kind], chats(rate, count), rules, ttft_ms=2000)


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
    assert first(chunks) > 1.15 * first(both) and first(chunks) > 1.15 * first(mixing)
    assert first(both) < 1.1 * first(mixing)  # the budget is full, so chunks delay nobody
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


def test_deadlines_lower_the_first_token_of_bursts_at_the_same_pace_of_tokens():
    """FairBatching, arXiv 2510.14392: decodes that are ahead of their deadlines make room for a
    burst of prompts.  Against the largest budget whose full steps keep the limit on a token."""
    prompt, output = arrivals.lengths("300/900", 4000), arrivals.lengths("150/400", 600)
    bursts = arrivals.generated(96, 6.0, prompt, output, burst=12, seed=2)
    budget, deadlines = (
        on(Engine, bursts, {"mode": mode, "token_budget": budget}, tpot_ms=50)
        for mode, budget in (("dynamic", 512), ("time", 2048))
    )
    assert deadlines["ttft_s"]["p99"] < 0.85 * budget["ttft_s"]["p99"]
    assert deadlines["goodput"]["share"] == budget["goodput"]["share"] == 1.0  # of TPOT alone
    assert deadlines["itl_ms"]["p99"] < 1.2 * budget["itl_ms"]["p99"]
