"""A million lines: how soon work starts, how soon it goes on, and what it costs in memory.

Times are of this process alone (CPU), so that a busy machine is no other test.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxserve.offline.files import JobFiles, Wishes
from jaxserve.offline.inputs import Input, InputFile
from jaxserve.offline.job import Outcome
from jaxserve.offline.output import Layout, Syncing
from jaxserve.offline.parse import Parser
from jaxserve.offline.reader import Reader
from jaxserve.offline.storage import LocalStorage
from jaxserve.request import SamplingParams
from tests.offline.small_job import NoLock

MILLION = 1_000_000
RESULT = (
    b'{"id":"batch_req_1","custom_id":"request-%d","response":{"status_code":200,"body":{"choices":'
    b'[{"index":0,"text":" a few words of an answer, so that it is as long as one","logprobs":null,'
    b'"finish_reason":"stop"}]}},"error":null}'
)


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("million") / "in.jsonl"
    line = (
        '{"custom_id": "request-%d", "method": "POST", "url": "/v1/chat/completions", "body": '
        '{"messages": [{"role": "user", "content": "Say something about the number %d."}], '
        '"max_tokens": 16}}\n'
    )
    with path.open("w") as file:
        for start in range(0, MILLION, 10_000):
            file.write("".join(line % (i, i) for i in range(start, start + 10_000)))
    return path


def open_job(given: Path) -> tuple[JobFiles, Input]:
    storage = LocalStorage()
    source = Input([InputFile(storage, str(given), given.name)])
    files = JobFiles(storage, Layout(f"{given}.out"), NoLock)
    files.prepare(source, {}, Wishes())
    return files, source


def first_line(files: JobFiles, source: Input) -> int:
    """Number of the first line that would be run."""
    parse = Parser(SamplingParams(), lambda task: [1])
    reader = Reader(source.lines(files.finished), parse)
    try:
        while (item := reader.take(wait=True)) is None:
            assert not reader.ended
        return item.place.number
    finally:
        reader.stop()


def test_b80_a_million_lines_start_and_resume_in_seconds_and_little_memory(million: Path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    files, source = open_job(million)
    assert first_line(files, source) == 1
    started = time.process_time() - begun
    output = files.open_output(Syncing(5.0))
    order = np.random.default_rng(0).permutation(MILLION)[: MILLION // 2]
    places = {int(index) for index in order}
    for line in source.lines():
        if line.place.index in places:
            output.write(line.place, Outcome.DONE, RESULT % line.place.index)
            if line.place.index % 16 == 0:
                output.flush()
    output.close()
    files.close()

    begun = time.process_time()
    files, source = open_job(million)
    number = first_line(files, source)
    resumed = time.process_time() - begun
    assert files.finished.sum() == MILLION // 2
    assert number == min(set(range(MILLION)) - places) + 1
    files.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    sys.stderr.write(f"start {started:.1f} s, resume {resumed:.1f} s, {grown:.0f} MiB\n")
    assert started < 5
    assert resumed < 30
    assert grown < 1024


@pytest.mark.gate
@pytest.mark.slow
def test_b80_a_million_lines_through_the_engine(tmp_path: Path):
    """Every line is scheduled, answered by the fake runner and journalled."""
    from tests.cli.test_signals import PROBE

    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with given.open("w") as file:
        for i in range(MILLION):
            file.write(f'{{"custom_id": "{i}", "prompt_token_ids": [5], "max_tokens": 1}}\n')
    code = PROBE.replace("time.sleep(0.005)", "pass")
    command = [sys.executable, "-c", code, "batch", str(given), "--output", str(output)]
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [*command, "--set", "scheduler.max_seqs=256"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert ran.returncode == 0, ran.stderr
    with output.open("rb") as file:
        assert sum(1 for _ in file) == MILLION
    assert "1000000 done, 0 failed of 1000000" in ran.stderr
