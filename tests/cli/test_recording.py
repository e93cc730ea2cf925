"""--record and --trace-out of the commands that run an engine, and of LLM."""

import json
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.lab import trace
from tests.cli.test_bench import lines, write


def test_bench_records_its_last_run_without_the_warm_up(jaxserve, tmp_path: Path):
    workload = write(tmp_path / "w.jsonl", lines(5))
    record, timeline = tmp_path / "run.trace", tmp_path / "run.json"
    options = ("--record", record, "--trace-out", timeline, "--json", "--repeat", 2)
    ran = jaxserve("bench", "--workload", workload, *options)
    assert ran.code == 0, ran.err
    report = json.loads(ran.out.splitlines()[-1])
    found = trace.load(record)
    assert len(found.steps) == report["steps"]
    assert [row.output for row in found.requests] == [40] * 5
    assert [row.prompt for row in found.requests] == [20, 21, 22, 23, 24]
    events = json.loads(timeline.read_text())["traceEvents"]
    assert sum(e["name"].startswith("request ") for e in events) == 5


def test_batch_records_and_a_timeline_alone_leaves_no_trace_behind(
    run, files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    files.write(*({"prompt": "a text", "max_tokens": 5, "ignore_eos": True} for _ in range(3)))
    timeline = tmp_path / "run.json"
    ran = run("--trace-out", timeline)
    assert ran.code == 0, ran.err
    events = json.loads(timeline.read_text())["traceEvents"]
    assert sum(e["name"].startswith("request ") for e in events) == 3
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_engine_records_until_it_is_closed(assembled, tmp_path: Path):
    record = tmp_path / "run.trace"
    with LLM(record=record) as llm:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))
    found = trace.load(record)
    assert [(row.prompt, row.output) for row in found.requests] == [(3, 4), (2, 4)]
    assert "token_budget = 512" in found.header.config


def test_a_missing_folder_is_bad_usage_before_anything_heavy(jaxserve, assembled, tmp_path: Path):
    workload = write(tmp_path / "w.jsonl", lines(1))
    for option in ("--record", "--trace-out"):
        ran = jaxserve("bench", "--workload", workload, option, tmp_path / "absent" / "f")
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert option in ran.err
    assert assembled == []


def test_several_machines_are_not_recorded(run, files):
    files.write({"prompt": "a"})
    ran = run("--ray", "--record", "f")
    assert (ran.code, "--record" in ran.err) == (2, True)
