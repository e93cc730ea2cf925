"""Figures of a replayed workload: throughput, latency, stalls, goodput.

TTFT is the time from submission to the first token, ITL a gap between two tokens of one request,
TPOT the mean gap of one request.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.metrics import StepRecord, Totals
from jaxserve.offline.report import EngineUse, share
from jaxserve.offline.workload import Replay, WorkItem


class Sizes(NamedTuple):
    """What the figures need to know of a request beside its times."""

    num_prompt: int  # tokens
    is_late: bool

    @classmethod
    def of(cls, items: Sequence[WorkItem]) -> "list[Sizes]":
        return [cls(len(item.prompt_token_ids), item.is_late) for item in items]


def quantile(values: Sequence[float], q: float) -> float | None:
    """The value at rank int(q * len), as the scripts of the peers count it; None for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """p50, p99 and max, times `scale`."""
    scaled = sorted(scale * value for value in values)
    return {"p50": quantile(scaled, 0.5), "p99": quantile(scaled, 0.99), "max": quantile(scaled, 1)}


def latency_figures(items: Sequence[Sizes], run: Replay) -> dict[str, Any]:
    """Throughput in tokens/s, TTFT in s, ITL and TPOT in ms, and the stall that late items
    cause."""
    wall = run.end - run.start
    prompt = sum(item.num_prompt for item in items)
    output = sum(len(times) for times in run.times)
    gaps = [b - a for times in run.times for a, b in itertools.pairwise(times)]
    figures: dict[str, Any] = {
        "wall_s": wall,
        "output_tokens_per_s": output / wall,
        "total_tokens_per_s": (prompt + output) / wall,
        "ttft_s": spread(_ttfts(run)),
        "itl_ms": spread(gaps, 1e3),
        "tpot_ms": spread([tpot for tpot in _tpots(run) if tpot is not None], 1e3),
    }
    if run.arrived is not None:
        figures["stall"] = _stall(items, run, run.arrived)
    return figures


def goodput(
    run: Replay, slo_ttft_ms: float | None, slo_tpot_ms: float | None
) -> dict[str, float | None]:
    """Share and rate of the requests that meet both limits; a limit of None is always met."""
    good = 0
    for ttft, tpot in zip(_ttfts(run), _tpots(run), strict=True):
        in_time = slo_ttft_ms is None or 1e3 * ttft <= slo_ttft_ms
        good += in_time and (slo_tpot_ms is None or tpot is None or 1e3 * tpot <= slo_tpot_ms)
    return {
        "slo_ttft_ms": slo_ttft_ms,
        "slo_tpot_ms": slo_tpot_ms,
        "share": good / len(run.times),
        "requests_per_s": good / (run.end - run.start),
    }


def step_figures(records: Sequence[StepRecord], run: Replay) -> dict[str, Any]:
    """Where the time of the steps went, and how well they were filled.

    `time_waste` is the share of device time and `token_waste` the share of computed tokens that
    went into padding; `budget_unused` counts steps by the reason why budget was left.
    """
    totals = Totals()
    kinds: dict[str, float] = {"prefill": 0.0, "decode": 0.0, "mixed": 0.0}
    for record in records:
        totals.add(record)
        kinds[_kind(record)] += record.device_s
    wall = run.end - run.start
    use = EngineUse.of(totals).figures(wall)
    host = totals.schedule_s + totals.build_s + totals.dispatch_s + totals.update_s
    return {
        "steps": totals.steps,
        "time_waste": use["time_waste"],
        "token_waste": use["token_waste"],
        "host_ms_per_step": share(1e3 * host, totals.steps),
        "device_idle_share": use["idle_share"],
        "phase_s": {
            "schedule": totals.schedule_s,
            "build": totals.build_s,
            "dispatch": totals.dispatch_s,
            "wait": totals.wait_s,
            "update": totals.update_s,
            "other": max(0.0, wall - host - totals.wait_s),
        },
        "device_s": kinds,
        "preemptions": totals.preemptions,
        "hit_tokens": totals.hit_tokens,
        "budget_unused": {why: n for why, n in totals.unused.items() if why != "full"},
        "bucket_steps": {str(bucket): n for bucket, n in sorted(totals.buckets.items())},
    }


def _kind(record: StepRecord) -> str:
    if not record.decode_tokens:
        return "prefill"
    return "mixed" if record.prefill_tokens + record.recomputed_tokens else "decode"


def _ttfts(run: Replay) -> list[float]:
    return [times[0] - sent for times, sent in zip(run.times, run.submitted, strict=True)]


def _tpots(run: Replay) -> list[float | None]:
    """None for a request of one token."""
    return [
        (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None for times in run.times
    ]


def _stall(items: Sequence[Sizes], run: Replay, arrived: float) -> dict[str, float | None]:
    """How the running streams fare until the first late item has its first token."""
    late = [times for item, times in zip(items, run.times, strict=True) if item.is_late]
    early = [times for item, times in zip(items, run.times, strict=True) if not item.is_late]
    first = min(times[0] for times in late)
    pairs = [pair for times in early for pair in itertools.pairwise(times)]
    before = [b - a for a, b in pairs if b <= arrived]
    during = [b - a for a, b in pairs if b > arrived and a < first]
    return {
        "undisturbed_gap_ms": quantile([1e3 * gap for gap in before], 0.5),
        "largest_gap_ms": quantile([1e3 * gap for gap in during], 1),
        "late_ttft_s": first - arrived,
    }
