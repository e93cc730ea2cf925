"""`jaxserve batch --ray` on a real cluster of two workers: kill -9 of an actor, of the driver."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import settings
from jaxserve.offline.job import JobOptions, Outcome
from jaxserve.offline.jsonl import Line, Place
from jaxserve.offline.progress import Snapshot
from jaxserve.request import SamplingParams

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow, pytest.mark.gate]

COUNT = 160
LINES: list[dict[str, Any]] = [
    {
        "custom_id": f"id-{i}",
        "prompt_token_ids": [3 + (7 * i + j) % 60 for j in range(1 + i % 30)],
        "max_tokens": 4 + i % 24,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": float(i % 2),
    }
    for i in range(COUNT)
]
ENCODED = [json.dumps(line).encode() + b"\n" for line in LINES]


def start(given: Path, output: Path, address: str, *more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jaxserve.cli.main", "batch", str(given), "--output", str(output)]
        + ["--json", *map(str, more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_ADDRESS": address},
    )


def tokens(path: Path) -> dict[str, list[int]]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {r["custom_id"]: r["response"]["body"]["choices"][0]["token_ids"] for r in results}
    assert len(by_id) == len(results)  # nothing twice
    return by_id


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "in.jsonl"
    path.write_bytes(b"".join(ENCODED))
    return path


@pytest.fixture(scope="module")
def alone(given: Path, engine_options: list[str]) -> dict[str, list[int]]:
    """What one engine without Ray gives."""
    output = given.with_name("alone.jsonl")
    process = start(given, output, "", *engine_options)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out)["done"] == COUNT
    return tokens(output)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Killer:
    """A sink that kills a worker's process after some results."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.results: dict[int, bytes] = {}
        self.job: Any = None
        self.killed: int | None = None

    def write(self, place: Place, outcome: Outcome, result: bytes) -> None:
        assert outcome is Outcome.DONE
        assert place.index not in self.results
        self.results[place.index] = result
        if self.killed is None and len(self.results) >= self.after:
            self.killed = next(iter(self.job.pids.values()))  # one that is known by now
            os.kill(self.killed, signal.SIGKILL)

    def flush(self) -> None: ...


class Silent:
    def update(self, now: Snapshot) -> None: ...

    def close(self) -> None: ...


def test_an_actor_that_is_killed_loses_nothing(
    alone: dict[str, list[int]], engine_options: list[str], tiny_model: Path
):
    from jaxserve.offline.crew import CrewJob
    from jaxserve.offline.ray_crew import RayCrew, WorkerSpec

    assigned = [option for option in engine_options if "=" in option]
    config = settings.merge(
        settings.read(None, assigned), {"model": {"name": str(tiny_model)}}, "test"
    )
    lines = [Line(Place(i + 1, i), data) for i, data in enumerate(ENCODED)]
    sink = Killer(after=30)
    with RayCrew(WorkerSpec(config, JobOptions(), SamplingParams()), 2) as crew:
        job = sink.job = CrewJob(crew, credit=40)
        job.run(iter(lines), sink, Silent())
        pids = job.pids
    assert sink.killed is not None and sink.killed not in pids.values()
    assert len(pids) == 2
    assert sorted(sink.results) == list(range(COUNT))
    assert 0 < job.redone <= 40
    found = [json.loads(sink.results[i]) for i in range(COUNT)]
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["token_ids"] for r in found}
    assert texts == alone
    totals = job.totals
    assert (totals.done, totals.failed) == (COUNT, 0)
    assert totals.output_tokens == sum(len(ids) for ids in alone.values())
    assert job.use.engines == 2 and 0 < job.use.device_s


def test_a_driver_that_is_killed_or_told_to_stop_resumes(
    alone: dict[str, list[int]], given: Path, engine_options: list[str], cluster: str
):
    output = given.with_name("ray.jsonl")
    options = ("--ray", "--ray-workers", 2, "--sync-interval", 0, "--grace", 0, *engine_options)

    def lines() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    process = start(given, output, cluster, *options)
    wait_until(lambda: lines() >= 20, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    killed_at = lines()
    assert killed_at < COUNT

    process = start(given, output, cluster, *options)
    wait_until(lambda: lines() >= killed_at + 10, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    parked = json.loads(out)
    assert 0 < parked["done_before"] <= killed_at < parked["done"] < COUNT

    process = start(given, output, cluster, *options)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    report = json.loads(out)
    assert (report["lines"], report["done"], report["failed"]) == (COUNT, COUNT, 0)
    assert report["done_before"] == parked["done"]
    assert report["engines"] == 2
    assert tokens(output) == alone


def test_an_engine_that_no_actor_can_make_ends_the_job(
    given: Path, engine_options: list[str], cluster: str, tmp_path: Path
):
    options = ("--ray", "--ray-workers", 1, *engine_options, "--set", "model.max_len=99999")
    process = start(given, tmp_path / "out.jsonl", cluster, *options)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "Traceback" not in err and "model.max_len=99999" in err
    assert json.loads(out)["done"] == 0
