"""A run as a timeline: JSON in the Trace Event Format, which ui.perfetto.dev and chrome://tracing
open.

Three processes: the engine (what the host does, what the device does, and counters), and requests,
each on a lane of its own while it lives: queued, prefill, decode.
"""

import gzip
import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.lab import trace
from jaxserve.lab.trace import RequestRow, Step

ENGINE, REQUESTS = 1, 2  # process ids
HOST, DEVICE = 1, 2  # thread ids of the engine
_PHASES = ("schedule", "build", "dispatch", "wait", "update")

type Event = dict[str, Any]


def convert(source: Path, target: Path) -> None:
    """Writes the timeline of a trace; a name that ends in .gz is compressed."""
    found = trace.load(source)
    opened = gzip.open(target, "wb") if target.suffix == ".gz" else open(target, "wb")
    encode = msgspec.json.encode
    with opened as file:
        header = found.header
        facts = {"version": header.version, "device": header.device, "config": header.config}
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(facts) + b',"traceEvents":[\n')
        first = True
        for event in events(found):
            file.write((b"" if first else b",\n") + encode(event))
            first = False
        file.write(b"\n]}\n")


def events(found: trace.Trace) -> Iterator[Event]:
    """Times in microseconds since the start of the trace."""
    yield from _names(ENGINE, "engine", {HOST: "host", DEVICE: "device"})
    yield from _host(found.steps)
    done = 0
    for step in found.steps:
        dispatched = step.at + step.phases[0] + step.phases[1]
        begun = max(dispatched, done)  # as device time is counted
        done = begun + step.device
        yield _slice(ENGINE, DEVICE, f"{step.kind} {step.bucket}", begun, step.device, _step(step))
        yield from _counters(step, found.header.facts.get("kv_blocks", 0))
    yield from _requests(found)


def _host(steps: list[Step]) -> Iterator[Event]:
    """The phases of all steps in the order of time, none over the next."""
    phases: list[tuple[int, int, str, int]] = []
    for number, step in enumerate(steps):
        at = step.at
        for name, length in zip(_PHASES, step.phases, strict=True):
            if name == "wait":  # of a step that was planned after another had been
                at = max(at, step.at + step.landed - length)
            phases.append((at, length, name, number))
            at += length
    phases.sort()
    ends = [at for at, *_ in phases[1:]] + [phases[-1][0] + phases[-1][1]] if phases else []
    for (at, length, name, number), end in zip(phases, ends, strict=True):
        yield _slice(ENGINE, HOST, name, at, min(length, end - at), {"step": number})


def _step(step: Step) -> dict[str, Any]:
    return {
        "decode tokens": step.decodes,
        "prefill tokens": step.prefill,
        "padded tokens": step.bucket - step.tokens,
        "decode context": step.context,
        "chunks (request, start, tokens)": str([list(chunk) for chunk in step.chunks]),
        "budget not used because": step.unused or "used up",
        "predicted ms": None if step.predicted is None else step.predicted / 1e3,
        "preempted": str(list(step.preempted)),
    }


def _counters(step: Step, kv_blocks: int) -> Iterator[Event]:
    values = {
        "queue": {"waiting": step.waiting, "running": step.running},
        "tokens of the step": {
            "decode": step.decodes,
            "prefill": step.prefill,
            "padding": step.bucket - step.tokens,
        },
        "KV blocks": {"used": step.kv_used, "free": max(0, kv_blocks - step.kv_used)},
    }
    for name, value in values.items():
        yield {"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": step.at, "args": value}


def _requests(found: trace.Trace) -> Iterator[Event]:
    end = max((step.at + step.landed for step in found.steps), default=0)
    begun: dict[int, int] = {}  # request -> first admission
    preempted: dict[int, list[int]] = {}
    for step in found.steps:
        for number in step.admitted:
            begun.setdefault(number, step.at)
        for number in step.preempted:
            preempted.setdefault(number, []).append(step.at)
    lanes: list[tuple[int, int]] = []  # free from, lane
    count = 0
    events: list[Event] = []
    for row in sorted(found.requests, key=lambda row: row.arrived):
        last = row.ended if row.ended is not None else end
        if lanes and lanes[0][0] <= row.arrived:
            lane = heapq.heappop(lanes)[1]
        else:
            count += 1
            lane = count
        heapq.heappush(lanes, (max(last, row.arrived), lane))
        events += _request(row, lane, max(last, row.arrived), begun.get(row.number), found.steps)
        for at in preempted.get(row.number, ()):
            mark = {"ph": "i", "s": "t", "pid": REQUESTS, "tid": lane}
            events.append({**mark, "name": f"preempt {row.number}", "ts": at})
    yield from _names(REQUESTS, "requests", {lane: f"lane {lane}" for lane in range(1, count + 1)})
    yield from events


def _request(
    row: RequestRow, lane: int, last: int, begun: int | None, steps: list[Step]
) -> Iterator[Event]:
    arguments = {
        "prompt tokens": row.prompt,
        "output tokens": row.output,
        "cached tokens": row.cached,
        "preemptions": row.num_preempted,
        "ended with": row.reason or "still running",
    }
    name = f"request {row.number}" + (f".{row.sample}" if row.sample else "")
    yield _slice(REQUESTS, lane, name, row.arrived, last - row.arrived, arguments)
    first = None
    if row.runs and row.runs[0][0] < len(steps):
        step = steps[row.runs[0][0]]
        first = step.at + step.landed
    marks = [("queued", row.arrived), ("prefill", begun), ("decode", first)]
    known = [(name, min(max(at, row.arrived), last)) for name, at in marks if at is not None]
    for (name, at), (_, until) in zip(known, [*known[1:], ("", last)], strict=True):
        yield _slice(REQUESTS, lane, name, at, max(0, until - at), {"request": row.number})


def _slice(pid: int, tid: int, name: str, at: int, length: int, args: dict[str, Any]) -> Event:
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "jaxserve"}
    return event | {"ts": at, "dur": length, "args": args}


def _names(pid: int, process: str, threads: dict[int, str]) -> Iterator[Event]:
    base = {"ph": "M", "pid": pid, "ts": 0}
    yield {**base, "tid": 0, "name": "process_name", "args": {"name": process}}
    yield {**base, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, name in threads.items():
        yield {**base, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {**base, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
