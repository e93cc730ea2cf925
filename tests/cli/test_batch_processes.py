"""Real processes: killed, stopped, doubled, out of room.  Then the same command again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_signals import PROBE, start, wait_until

ROOT = Path(__file__).parents[2]
KILLED, COUNT = 500, 600  # lines
SLOW = PROBE.replace("time.sleep(0.005)", "time.sleep(0.05)")
HANGS = PROBE.replace("time.sleep(0.005)", "time.sleep(0.005 if self.steps < 60 else 100)")


def write_lines(path: Path, count: int) -> None:
    rows = (
        {"custom_id": f"id-{i}", "prompt": f"{i}", "temperature": 0.8, "seed": i, "max_tokens": 12}
        for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts(output: Path) -> dict[str, str]:
    data = output.read_bytes()
    assert data.endswith(b"\n")
    rows = [json.loads(line) for line in data.splitlines()]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert len(found) == len(rows), "a line has two results"
    return found


def killer(
    kills: int, given: Path, output: Path, *more: object
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.cli.killer", "3", str(kills), "batch", given]
    return subprocess.run(
        [*map(str, command), "--output", str(output), *map(str, more)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
        timeout=580,
    )


def test_b80_killed_at_30_random_times_every_line_ends_exactly_once(tmp_path: Path):
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(given, KILLED)
    options = ("--set", "scheduler.max_seqs=4")
    undisturbed = killer(0, given, tmp_path / "whole.jsonl", *options)
    assert undisturbed.returncode == 0, undisturbed.stderr
    ran = killer(30, given, output, *options)
    assert ran.returncode == 0, ran.stderr
    sizes = [int(size) for size in ran.stdout.split()]
    assert len(sizes) == 30
    assert len(set(sizes)) > 8, f"most kills came before there was anything to lose: {sizes}"
    least = max(a - b for a, b in zip(sizes, sizes[1:], strict=False))
    assert least <= 1000, "what was written was taken back (a torn line at the end may be)"
    assert texts(output) == texts(tmp_path / "whole.jsonl")
    assert len(texts(output)) == KILLED


def stop_when_running(
    tmp_path: Path, *options: object, code: str = SLOW
) -> tuple[subprocess.Popen[str], Path]:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(given, COUNT)
    process = start("batch", given, "--output", output, "--json", *options, code=code)
    wait_until(lambda: output.exists() and output.stat().st_size > 2000, process)
    return process, output


def resume(tmp_path: Path) -> dict[str, Any]:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    process = start("batch", given, "--output", output, "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert len(texts(output)) == COUNT
    return json.loads(out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_finishes_what_is_in_flight_and_exits_75(number: int, tmp_path: Path):
    process, output = stop_when_running(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    report = json.loads(out)
    assert report["interrupted"]
    assert report["done"] == len(texts(output)) < COUNT
    assert resume(tmp_path)["done_before"] == report["done"]


def test_grace_ends_the_wait_for_what_is_in_flight(tmp_path: Path):
    process, output = stop_when_running(tmp_path, "--grace", 0)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert json.loads(out)["done"] == len(texts(output))
    resume(tmp_path)


def test_a_second_signal_exits_at_once_even_when_the_device_hangs(tmp_path: Path):
    process, output = stop_when_running(tmp_path, code=HANGS)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert time.monotonic() - begun < 5
    assert "stopped at once" in err
    done = len(texts(output))
    assert resume(tmp_path)["done_before"] == done > 0


def test_two_processes_at_once(tmp_path: Path):
    first, output = stop_when_running(tmp_path, code=HANGS)
    second = start("batch", tmp_path / "in.jsonl", "--output", output)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"another process (pid {first.pid} on " in err
    assert err.count("\n") == 1
    first.kill()
    first.communicate(timeout=60)
    assert resume(tmp_path)["done_before"] > 0, "the lock went with the process that held it"


def check_full(process: subprocess.Popen[str], output: Path, words: str) -> None:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert err.count("error:") == 1 and words in err
    assert "run it again" in err
    assert "Traceback" not in err


def test_a_file_that_may_not_grow_ends_the_job_and_the_next_run_goes_on(tmp_path: Path):
    write_lines(tmp_path / "in.jsonl", COUNT)
    output = tmp_path / "out.jsonl"
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    command = ("batch", tmp_path / "in.jsonl", "--output", output)
    process = start(*command, code=f"{limited}\n{PROBE}")
    check_full(process, output, "File too large")
    assert resume(tmp_path)["done_before"] > 50


def test_a_full_tmpfs_ends_the_job_and_the_next_run_goes_on(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        write_lines(tmp_path / "in.jsonl", COUNT)
        output = disk / "out.jsonl"
        process = start("batch", tmp_path / "in.jsonl", "--output", output)
        check_full(process, output, "No space left on device")
        assert b"\n" in output.read_bytes()
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        process = start("batch", tmp_path / "in.jsonl", "--output", output)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert len(texts(output)) == COUNT
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path):
    """Read-only even for root: a file system that is mounted so."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,ro", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere and may not mount")
        disk.chmod(0o500)
    try:
        write_lines(tmp_path / "in.jsonl", 10)
        process = start("batch", tmp_path / "in.jsonl", "--output", disk / "out.jsonl")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert err.count("\n") == 1 and "cannot be written" in err
    finally:
        subprocess.run(["umount", "-l", str(disk)], capture_output=True)
