"""What another terminal sees of a job."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.offline import status
from jaxserve.offline.progress import Snapshot
from jaxserve.offline.status import NAME, StatusFile, judge
from jaxserve.offline.storage import LocalStorage
from tests.cli.files import GOOD, Files, strict
from tests.cli.test_signals import start, wait_until

NOW = 1_000_000.0
HERE = LocalStorage()


def read(folder: Path) -> status.Status:
    return status.read(HERE, str(folder))


def status_path(output: Path) -> Path:
    return Path(f"{output}.journal") / NAME


def test_it_is_written_now_and_then_as_a_whole(tmp_path: Path):
    output, now = tmp_path, NOW
    file = StatusFile(HERE, str(output), 100, 20, clock=lambda: now, model="m")
    first = read(output)
    assert (first.state, first.lines, first.resumed, first.done) == ("running", 100, 20, 0)
    assert first.facts == {"model": "m"}
    written = (output / NAME).stat().st_ino
    now += 0.9
    file.update(Snapshot(done=9, failed=0, tokens=90))
    assert read(output).done == 0
    now += 9.1
    file.update(Snapshot(done=30, failed=10, tokens=500, running=4, waiting=2, kv_used=0.5))
    seen = read(output)
    assert (output / NAME).stat().st_ino != written  # replaced, never half written
    assert (seen.done, seen.failed, seen.running, seen.waiting) == (30, 10, 4, 2)
    assert seen.kv_used == 0.5 and seen.tokens_per_s == pytest.approx(50)
    assert seen.eta_s == pytest.approx((100 - 20 - 40) * 10 / 40)
    file.update(Snapshot(done=60, failed=20, tokens=900), last=True)
    assert read(output).done == 30
    file.end("done")
    assert (read(output).state, read(output).done, read(output).eta_s) == ("done", 60, None)
    assert os.listdir(tmp_path) == [NAME]


def test_a_disk_that_is_full_does_not_stop_a_job(tmp_path: Path, monkeypatch):
    file = StatusFile(HERE, str(tmp_path), 1)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status, "_replace", full)
    file.end("done")
    assert os.listdir(tmp_path) == [NAME]
    assert read(tmp_path).state == "running"


def test_a_process_that_is_gone_is_dead_and_its_pid_used_again_is_not_it(tmp_path: Path):
    output = tmp_path
    StatusFile(HERE, str(output), 1, clock=lambda: NOW)
    found = read(output)
    assert judge(found, NOW + 1) == "running"
    assert judge(found, NOW + 100) == "silent"
    found.born = (found.born or 0) + 1
    assert judge(found, NOW + 1) == "dead"
    found.state = "parked"
    assert judge(found, NOW + 100) == "parked"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    found.state, found.pid, found.born = "running", child.pid, None
    assert judge(found, NOW + 1) == "dead"
    found.host = "elsewhere"
    assert judge(found, NOW + 1) == "running"
    assert judge(found, NOW + 100) == "silent"


def test_the_command_tells_of_a_job_that_is_done(jaxserve, run, files: Files):
    files.write(GOOD, b"{", GOOD)
    assert run().code == 1
    ran = jaxserve("batch", "status", files.output)
    assert ran.code == 0
    assert ran.out.startswith("done: 3 of 3 lines (100%), 1 failed in this run; ")
    seen = strict(jaxserve("batch", "status", files.output, "--json").out)
    assert (seen["state"], seen["lines"], seen["done"], seen["failed"]) == ("done", 3, 2, 1)
    assert jaxserve("batch", "status", files.output, "--watch").code == 0


def test_a_job_that_was_killed_behind_its_last_result_is_done(jaxserve, run, files: Files):
    files.write(GOOD, GOOD)
    assert run().code == 0
    path = status_path(files.output)
    killed = strict(path.read_text()) | {"state": "running", "pid": 2**22 + 1}
    path.write_text(json.dumps(killed))
    assert jaxserve("batch", "status", files.output).out.startswith("dead: ")
    assert run().code == 0
    assert jaxserve("batch", "status", files.output).out.startswith("done: 2 of 2 lines (100%)")
    before = path.stat().st_mtime_ns
    assert run().code == 0
    assert path.stat().st_mtime_ns == before


def test_no_job_and_no_status_file(jaxserve, files: Files):
    ran = jaxserve("batch", "status", files.output)
    assert ran.code == 2
    assert "no job is known" in ran.err and ran.err.count("\n") == 1
    status_path(files.output).parent.mkdir()
    status_path(files.output).write_text("{")
    ran = jaxserve("batch", "status", files.output)
    assert ran.code == 2 and "is no status file" in ran.err


def test_an_input_named_like_a_command_is_still_an_input(jaxserve, files: Files, monkeypatch):
    monkeypatch.chdir(files.input.parent)
    files.write(GOOD)
    files.input.rename("status")
    assert jaxserve("batch", "./status", "--output", files.output).code == 0
    assert len(files.read()) == 1


def test_a_running_job_and_one_that_was_killed(tmp_path: Path, jaxserve):
    """The job is another process; kill -9 leaves it no chance to say so."""
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(20_000)))
    process = start("batch", given, "--output", output)

    def seen() -> dict:
        return strict(jaxserve("batch", "status", output, "--json").out)

    wait_until(lambda: status_path(output).exists() and seen()["done"] > 0, process)
    now = seen()
    assert now["state"] == "running" and now["pid"] == process.pid
    assert 0 < now["done"] + now["failed"] < now["lines"] == 20_000
    assert now["eta_s"] > 0 and now["tokens_per_s"] > 0 and 0 < now["kv_used"] <= 1
    process.send_signal(signal.SIGKILL)
    process.communicate()
    ran = jaxserve("batch", "status", output)
    assert ran.out.startswith("dead: ") and "the same command resumes it" in ran.out
