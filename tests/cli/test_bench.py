"""`jaxserve bench`: the keys other tools read, and the same definitions as the peers' script."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.driver import Driver
from jaxserve.offline.errors import InputError
from jaxserve.offline.figures import Sizes, goodput, latency_figures, quantile
from jaxserve.offline.workload import Replay, WorkItem, read_workload, replay
from tests.cli import fakes

KEYS = {
    *("engine", "model", "dtype", "budget", "workload", "startup_s", "wall_s", "peak_rss_mb"),
    *("output_tokens_per_s", "total_tokens_per_s", "ttft_s", "itl_ms", "tpot_ms", "goodput"),
    *("compiles_after_warmup", "programs", "compile_s", "time_waste", "token_waste"),
    *("host_ms_per_step", "device_idle_share", "budget_unused", "phase_s", "device_s"),
}


def lines(count: int, *, late: int = 0, max_tokens: int = 40) -> list[dict[str, Any]]:
    rows = [
        {"id": i, "prompt_token_ids": [(7 * i + k) % 250 for k in range(20 + i)]}
        for i in range(count + late)
    ]
    for i, row in enumerate(rows):
        row["max_tokens"] = max_tokens
        row["arrive"] = "start" if i < count else "after_32"
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_object_a_run_with_the_agreed_keys(jaxserve, tmp_path: Path):
    workload, saved = write(tmp_path / "W9.jsonl", lines(6)), tmp_path / "ids.json"
    ran = jaxserve(
        *("bench", "--workload", workload, "--json", "--repeat", 2, "--save-outputs", saved),
        *("--slo-ttft-ms", 10_000, "--slo-tpot-ms", 10_000, "--set", "scheduler.token_budget=64"),
    )
    assert ran.code == 0, ran.err
    reports = [json.loads(line) for line in ran.out.splitlines()]
    assert len(reports) == 2
    for report in reports:
        assert KEYS <= set(report)
        assert "stall" not in report
        assert (report["workload"], report["budget"]) == ("W9.jsonl", 64)
        for name in ("ttft_s", "itl_ms", "tpot_ms"):
            assert list(report[name]) == ["p50", "p99", "max"]
            assert report[name]["p50"] <= report[name]["p99"] <= report[name]["max"]
        assert report["goodput"]["share"] == 1
        assert report["hit_tokens"] == 0
        assert sum(report["bucket_steps"].values()) == report["steps"]
        assert sum(report["budget_unused"].values()) <= report["steps"]
        assert report["token_waste"] < 1
    outputs = json.loads(saved.read_text())
    assert [len(ids) for ids in outputs] == [40] * 6


def test_the_prefix_cache_is_off_unless_asked_for(jaxserve, tmp_path: Path, assembled):
    rows = lines(1)
    rows = [rows[0] | {"id": i, "prompt_token_ids": list(range(100))} for i in range(3)]
    workload = write(tmp_path / "w.jsonl", rows)
    hits = [
        json.loads(jaxserve("bench", "--workload", workload, "--json", *more).out)["hit_tokens"]
        for more in ([], ["--prefix-caching"])
    ]
    assert hits[0] == 0
    assert hits[1] > 0


def test_late_requests_give_the_stall(jaxserve, tmp_path: Path):
    workload = write(tmp_path / "w.jsonl", lines(4, late=1))
    report = json.loads(jaxserve("bench", "--workload", workload, "--json").out)
    assert list(report["stall"]) == ["undisturbed_gap_ms", "largest_gap_ms", "late_ttft_s"]
    assert all(value >= 0 for value in report["stall"].values())


def test_figures_for_people(jaxserve, tmp_path: Path):
    ran = jaxserve("bench", "--workload", write(tmp_path / "w.jsonl", lines(2)))
    assert ran.code == 0
    assert "output_tokens_per_s" in ran.out
    assert "ttft_s.p50" in ran.out


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"id": 1, "prompt_token_ids": [1]}], "line 1"),
        ([*lines(1), {"id": 5, "prompt_token_ids": [], "max_tokens": 1}], "line 2"),
        ([{"id": 1, "prompt_token_ids": [1], "max_tokens": 0}], "max_tokens"),
        ([*lines(1), *lines(1)], "same id"),
        (lines(0, late=1), "arrives at the start"),
        (lines(1, late=1, max_tokens=31), "31"),
        ([], "arrives at the start"),
    ],
)
def test_bad_workloads_are_refused_before_anything_heavy(
    rows: list[dict[str, Any]], words: str, jaxserve, assembled, tmp_path: Path
):
    path = write(tmp_path / "w.jsonl", rows)
    with pytest.raises(InputError, match=words):
        read_workload(path)
    ran = jaxserve("bench", "--workload", path)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert assembled == []


def test_fields_of_other_tools_are_let_through(tmp_path: Path):
    rows = [row | {"src": "a conversation"} for row in lines(2)]
    assert len(read_workload(write(tmp_path / "W.jsonl", rows))) == 2


def test_a_prompt_the_model_cannot_take_is_bad_input(jaxserve, tmp_path: Path):
    rows = [{"id": 1, "prompt_token_ids": [5] * 400, "max_tokens": 1}]
    ran = jaxserve("bench", "--workload", write(tmp_path / "w.jsonl", rows))
    assert (ran.code, ran.out) == (2, "")
    assert "400" in ran.err


def test_late_items_are_sent_when_every_stream_has_32_tokens():
    from jaxserve.config import EngineConfig

    made = fakes.assemble(EngineConfig())
    items = [
        WorkItem(row["id"], tuple(row["prompt_token_ids"]), row["max_tokens"], row["arrive"])
        for row in lines(3, late=2)
    ]
    run = replay(Driver(made.engine, made.tokenizer), items)
    assert run.arrived is not None
    for times in run.times[:3]:
        assert sum(t <= run.arrived for t in times) >= 32
    for times, sent in zip(run.times[3:], run.submitted[3:], strict=True):
        assert times[0] > sent == run.arrived
    assert [len(ids) for ids in run.outputs] == [40] * 5


def peer_figures(rows: list[dict[str, Any]], run: Replay) -> dict[str, Any]:
    """As the peers' script computes them, from its text."""
    times = {r["id"]: t for r, t in zip(rows, run.times, strict=True)}
    submitted = {r["id"]: s for r, s in zip(rows, run.submitted, strict=True)}
    late = [r for r in rows if r["arrive"] != "start"]
    early = [r for r in rows if r not in late]
    wall = run.end - run.start
    prompt = sum(len(r["prompt_token_ids"]) for r in rows)
    output = sum(r["max_tokens"] for r in rows)
    gaps = [b - a for t in times.values() for a, b in itertools.pairwise(t)]
    ttft = [t[0] - submitted[rid] for rid, t in times.items()]
    result: dict[str, Any] = {
        "output_tokens_per_s": output / wall,
        "total_tokens_per_s": (prompt + output) / wall,
        "ttft_s": (quantile(ttft, 0.5), quantile(ttft, 0.99), max(ttft)),
        "itl_ms": (1e3 * quantile(gaps, 0.5), 1e3 * quantile(gaps, 0.99), 1e3 * max(gaps)),
    }
    if late:
        first = min(times[r["id"]][0] for r in late)
        pairs = [p for r in early for p in itertools.pairwise(times[r["id"]])]
        calm = quantile([b - a for a, b in pairs if b <= run.arrived], 0.5)
        worst = max(b - a for a, b in pairs if b > run.arrived and a < first)
        result["stall"] = (1e3 * calm, 1e3 * worst, first - run.arrived)
    return result


@settings(derandomize=True, deadline=None)
@given(data=st.data(), late=st.integers(0, 2))
def test_figures_equal_those_of_the_peers_script(data: st.DataObject, late: int):
    rows = lines(3, late=late, max_tokens=34)
    gap = st.floats(1e-4, 0.5)
    times, submitted = [], []
    arrived = None
    for row in rows:
        if row["arrive"] != "start" and arrived is None:
            arrived = max(t[31] for t in times)
        sent = 0.0 if row["arrive"] == "start" else arrived
        assert sent is not None
        submitted.append(sent)
        gaps = data.draw(st.lists(gap, min_size=34, max_size=34))
        times.append(list(itertools.accumulate(gaps, initial=sent))[1:])
    run = Replay(0.0, max(t[-1] for t in times), submitted, times, arrived, [()] * len(rows))
    items = [
        WorkItem(row["id"], tuple(row["prompt_token_ids"]), row["max_tokens"], row["arrive"])
        for row in rows
    ]
    found, expected = latency_figures(Sizes.of(items), run), peer_figures(rows, run)
    for name, value in expected.items():
        mine = tuple(found[name].values()) if isinstance(value, tuple) else found[name]
        assert mine == pytest.approx(value)


def test_goodput_counts_requests_that_meet_both_limits():
    times = [[1.0, 1.1, 1.2], [1.0, 2.0, 3.0], [5.0, 5.1, 5.2], [1.0]]
    run = Replay(0.0, 10.0, [0.0] * 4, times, None, [()] * 4)
    assert goodput(run, 2000, 200)["share"] == 0.5
    assert goodput(run, None, 200)["share"] == 0.75
    assert goodput(run, 2000, None)["share"] == 0.75
    assert goodput(run, None, None)["share"] == 1
    assert goodput(run, 2000, 200)["requests_per_s"] == 0.2


def test_quantiles():
    assert quantile([], 0.5) is None
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(list(range(100)), 0.99) == 99
    assert quantile([1], 1) == 1
