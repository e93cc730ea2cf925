"""The real engine, killed and resumed: with pinned shapes the same to the bit as undisturbed."""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT, KILLS = 60, 5
PINNED = ("--set", "runner.deterministic=true", "--set", "scheduler.chunk_size=8")


def write_lines(path: Path) -> None:
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(COUNT):
            prompt = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 30))]
            sampling = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
            line = {"custom_id": f"c{number}", "prompt_token_ids": prompt, "max_tokens": 40}
            file.write(json.dumps(line | sampling | {"ignore_eos": True}) + "\n")


def answers(output: Path) -> dict[str, str]:
    """Everything that a line got, by id."""
    data = output.read_bytes()
    assert data.endswith(b"\n")
    rows = [json.loads(line) for line in data.splitlines()]
    found = {row["custom_id"]: json.dumps(row["response"]["body"]["choices"]) for row in rows}
    assert len(found) == len(rows), "a line has two results"
    return found


@pytest.fixture
def begin(
    tmp_path: Path, engine_options: list[str]
) -> Callable[..., tuple[subprocess.Popen[str], Path]]:
    def begin(name: str, *more: str) -> tuple[subprocess.Popen[str], Path]:
        output = tmp_path / name
        command = [sys.executable, "-m", "jaxserve.cli.main", "batch", str(tmp_path / "in.jsonl")]
        command += ["--output", str(output), "--token-ids", "--json", *engine_options, *PINNED]
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *more], stdout=pipe, stderr=pipe, text=True, env=env), (
            output
        )

    return begin


def finish(process: subprocess.Popen[str], code: int) -> dict[str, int]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return json.loads(out)


def wait_for(output: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the output has so many whole lines."""
    deadline = time.monotonic() + 300
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
def test_b80_a_real_engine_that_is_killed_says_the_same_to_the_bit(tmp_path: Path, begin):
    write_lines(tmp_path / "in.jsonl")
    process, whole = begin("whole.jsonl")
    assert finish(process, 0)["done"] == COUNT
    rng, sizes = random.Random(2), [0]
    for _ in range(KILLS):
        process, output = begin("out.jsonl")
        wait_for(output, sizes[-1] + rng.randrange(1, 6), process)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -9, "it finished before it was killed"
        sizes.append(output.read_bytes().count(b"\n"))
    assert all(a < b for a, b in itertools.pairwise(sizes)), f"work was taken back: {sizes}"
    process, output = begin("out.jsonl", "--grace", "0")
    wait_for(output, sizes[-1] + 1, process)
    process.terminate()
    parked = finish(process, 75)
    assert parked["done_before"] >= sizes[-1] - 4, "more than one step was redone"
    last, output = begin("out.jsonl")
    report = finish(last, 0)
    assert report["done_before"] == parked["done"] < COUNT
    assert answers(output) == answers(whole)
    assert len(answers(output)) == COUNT
