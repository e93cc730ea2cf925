"""A job of a few lines without an engine, over any storage."""

import dataclasses
import json
from collections import Counter
from typing import Any

from jaxserve.offline.codecs import codec_of
from jaxserve.offline.files import JobFiles, Wishes
from jaxserve.offline.inputs import Input, InputFile
from jaxserve.offline.job import Outcome
from jaxserve.offline.jsonl import Line
from jaxserve.offline.output import Layout, Syncing
from jaxserve.offline.storage import Storage

NOTHING = Wishes()


class NoLock:
    def __init__(self, *_: Any) -> None: ...

    def sign(self) -> None: ...

    def renew(self) -> None: ...

    def release(self) -> None: ...


@dataclasses.dataclass
class Attempt:
    """What one run of the job did."""

    ran: list[str] = dataclasses.field(default_factory=list)
    written: list[str] = dataclasses.field(default_factory=list)  # and flushed
    durable: set[str] = dataclasses.field(default_factory=set)  # a sync returned
    completed: bool = False


def lines(count: int) -> bytes:
    rows = [{"custom_id": f"id-{i}", "prompt": f"{i}"} for i in range(count)]
    rows += [{"prompt": "same"}, {"prompt": "same"}]
    return "".join(json.dumps(row) + "\n" for row in rows).encode().rstrip(b"\n")


def answer(line: Line, fails: tuple[str, ...] = ()) -> tuple[str, Outcome, bytes]:
    """What the engine would say: a pure function of the line."""
    value = json.loads(line.data or b"")
    name = value.get("custom_id", f"line-{line.number}")
    outcome = Outcome.RETRYABLE if name in fails else Outcome.DONE
    text = value["prompt"] * 7 if outcome == Outcome.DONE else "failed"
    return name, outcome, json.dumps({"custom_id": name, "text": text}).encode()


def run(
    storage: Storage,
    layout: Layout,
    given: InputFile,
    attempt: Attempt,
    *,
    wishes: Wishes = NOTHING,
    fails: tuple[str, ...] = (),
    roll_bytes: int | None = None,
) -> None:
    """Two lines are in flight and finish in the other order; every third flush is a sync."""
    files = JobFiles(storage, layout, NoLock)
    source = Input([given])
    files.prepare(source, {"model": "tiny"}, wishes)
    now = 0.0
    output = files.open_output(Syncing(3.0, roll_bytes, lambda: now))
    flight: list[Line] = []
    unsynced: list[str] = []

    def finish() -> None:
        nonlocal now
        line = flight.pop()
        name, outcome, result = answer(line, fails)
        attempt.ran.append(name)
        output.write(line.place, outcome, result)
        unsynced.append(name)
        now += 1.0
        due = now % 3.0 == 0
        output.flush()
        attempt.written.append(name)
        if due:
            attempt.durable.update(unsynced)
            unsynced.clear()

    for line in source.lines(files.finished):
        flight.append(line)
        if len(flight) > 1:
            finish()
    while flight:
        finish()
    output.close()
    attempt.durable.update(unsynced)
    attempt.completed = True
    files.close()


def results(contents: list[bytes], path: str) -> dict[str, str]:
    """Text by custom_id; every line whole, and none twice."""
    decoded = b"".join(codec_of(path).decode(data) if data else b"" for data in contents)
    assert not decoded or decoded.endswith(b"\n")
    rows = [json.loads(line) for line in decoded.splitlines()]
    counts = Counter(row["custom_id"] for row in rows)
    assert max(counts.values(), default=1) == 1, counts
    return {row["custom_id"]: row["text"] for row in rows}
