"""What a job cost and how well it used its engines."""

import dataclasses

import pytest

from jaxserve import metrics
from jaxserve.offline.report import EngineUse, cost

FULL = EngineUse(
    engines=1, steps=10, device_s=9.0, padding_s=0.9, tokens=900, padded_tokens=100,
    recomputed_tokens=5, hit_tokens=50, preemptions=2,
)  # fmt: skip


def test_idle_is_what_no_step_filled():
    assert FULL.figures(10.0)["idle_share"] == pytest.approx(0.1)
    both = FULL + dataclasses.replace(FULL, device_s=5.0)
    assert both.figures(10.0)["idle_share"] == pytest.approx(1 - 14 / 20)
    assert FULL.figures(8.0)["idle_share"] == 0.0  # clocks differ by a little
    assert EngineUse().figures(0.0)["idle_share"] == 0.0


def test_waste_is_a_share_of_what_was_computed():
    figures = FULL.figures(10.0)
    assert figures["time_waste"] == pytest.approx(0.1)
    assert figures["token_waste"] == pytest.approx(0.1)
    assert EngineUse().figures(1.0)["token_waste"] == 0.0


def test_use_adds_up_and_what_came_before_is_taken_off():
    later = FULL + FULL
    assert later.since(FULL) == dataclasses.replace(FULL, engines=2)
    totals = metrics.Totals(decode_tokens=5, prefill_tokens=7, recomputed_tokens=3, steps=2)
    assert (EngineUse.of(totals).tokens, EngineUse.of(totals).engines) == (15, 1)


def test_cost():
    assert cost(1800, 4.0, 1_000_000) == {
        "price_per_hour": 4.0, "cost": 2.0, "cost_per_million_output_tokens": 2.0,
    }  # fmt: skip
    assert cost(60, 1.0, 0)["cost_per_million_output_tokens"] is None
