"""--trace-out against the Trace Event Format (the document of that name, the JSON Array and Object
formats): what the viewer needs of each kind of event, and times that fit together."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve.lab import perfetto
from tests.lab.test_record import busy

METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def check_event(event: dict[str, Any]) -> None:
    """The rules of the format for the phases in use."""
    assert event["ph"] in ("X", "C", "M", "i")
    assert isinstance(event["name"], str) and event["name"]
    assert all(type(event[key]) is int for key in ("pid", "tid"))
    assert isinstance(event["ts"], int | float) and not isinstance(event["ts"], bool)
    assert isinstance(event.get("args", {}), dict)
    assert set(event) <= {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args", "s"}
    if event["ph"] == "X":
        assert event["dur"] >= 0
    elif event["ph"] == "C":
        assert event["args"]
        assert all(type(value) in (int, float) for value in event["args"].values())
    elif event["ph"] == "M":
        key = METADATA[event["name"]]
        assert type(event["args"][key]) is (str if key == "name" else int)
    else:
        assert event["s"] in ("g", "p", "t")


def check_nesting(slices: list[dict[str, Any]]) -> None:
    """Slices of one thread lie side by side or inside each other: viewers drop others."""
    open_ends: list[int] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1], event
        open_ends.append(event["ts"] + event["dur"])


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_timeline_is_in_the_format_and_holds_the_run(name: str, overlap: bool, tmp_path: Path):
    rig, found = busy(tmp_path / "t", overlap=overlap, blocks=60)
    perfetto.convert(tmp_path / "t", tmp_path / name)
    data = (tmp_path / name).read_bytes()
    if name.endswith(".gz"):
        data = gzip.decompress(data)
    whole = json.loads(data)
    assert set(whole) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events = whole["traceEvents"]
    for event in events:
        check_event(event)
    slices = [event for event in events if event["ph"] == "X"]
    by_thread = itertools.groupby(
        sorted(slices, key=lambda e: (e["pid"], e["tid"])), key=lambda e: (e["pid"], e["tid"])
    )
    for _, group in by_thread:
        check_nesting(list(group))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} == named

    device = [e for e in slices if (e["pid"], e["tid"]) == (perfetto.ENGINE, perfetto.DEVICE)]
    assert len(device) == len(found.steps)
    assert sum(e["dur"] for e in device) == sum(step.device for step in found.steps)
    whole_requests = [e for e in slices if e["name"].startswith("request ")]
    assert len(whole_requests) == len(found.requests)
    decodes = [e for e in slices if e["name"] == "decode"]
    assert len(decodes) == sum(bool(row.runs) for row in found.requests)
    marks = [e for e in events if e["ph"] == "i"]
    assert len(marks) == rig.engine.stats.preemptions
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"queue", "tokens of the step", "KV blocks"}


@pytest.mark.parametrize("overlap", [False, True])
def test_device_slices_end_as_their_results_arrive(overlap: bool, tmp_path: Path):
    """The host takes no virtual time, so what is derived from device seconds must be exact."""
    _, found = busy(tmp_path / "t", overlap=overlap)
    steps = [msgspec.structs.replace(step, phases=(0,) * 5) for step in found.steps]
    found = msgspec.structs.replace(found, steps=steps)
    ends = [
        e["ts"] + e["dur"]
        for e in perfetto.events(found)
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (perfetto.ENGINE, perfetto.DEVICE)
    ]
    waited = 0
    for end, step in zip(ends, steps, strict=True):
        assert end <= step.at + step.landed + 1 * len(steps)  # rounded to microseconds
        waited += abs(end - step.at - step.landed) <= len(steps)
    assert waited > 0.9 * len(steps)
