"""Real processes: Ctrl-C, a reader that leaves, and what is on disk afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROBE = """
import sys, time, types, pathlib
from jaxserve import sources
from tests.cli import fakes
sources.resolve = lambda name, **_: pathlib.Path(fakes.__file__)
build = types.ModuleType("jaxserve.build")
build.assemble = fakes.assemble
sys.modules["jaxserve.build"] = build
dispatch = fakes.FakeRunner.dispatch
def slow(self, batch):
    time.sleep(0.005)
    return dispatch(self, batch)
fakes.FakeRunner.dispatch = slow
from jaxserve.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def start(*argv: object, code: str = PROBE, **options: Any) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        **options,
    )


def wait_until(condition, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_ends_a_job_with_whole_results_and_a_summary(tmp_path: Path):
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(5000)))
    process = start("batch", given, "--output", output, "--json")
    wait_until(lambda: output.exists() and output.stat().st_size > 2000, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "Traceback" not in err
    report = json.loads(out)
    assert report["interrupted"]
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert report["done"] == len(results) < 5000
    assert all(result["error"] is None for result in results)


def test_ctrl_c_ends_a_streamed_answer(tmp_path: Path):
    process = start("generate", "x", "--raw", "--max-tokens", 200, "--set", "runner.overlap=true")
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_a_reader_that_leaves_is_no_error_message():
    process = start("generate", "x", "--raw", "--max-tokens", 200, "--seed", 1, "--temperature", 1)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) != 0
    assert err == ""
