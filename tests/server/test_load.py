"""Hundreds of streams from another process: nothing is lost or doubled, and nothing grows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli import fakes
from tests.server.rig import wait_for
from tests.server.test_process import ROOT, Process, ready, serving

STREAMS = 256
MOST_GROWTH = 12 << 20  # bytes of a process, after a first third of the load
OPTIONS = ("--set", "scheduler.max_seqs=256", "--set", "server.log_requests=false")


@pytest.mark.gate
@pytest.mark.slow
def test_256_streams_lose_and_double_nothing(tmp_path: Path):
    under_load(tmp_path, rounds=[15.0, 45.0])


@pytest.mark.slow
def test_256_streams_for_ten_minutes(tmp_path: Path):
    under_load(tmp_path, rounds=[60.0, 540.0])


def under_load(folder: Path, rounds: list[float]) -> None:
    """The first round is for caches to fill; memory must not grow any more after it."""
    fakes.byte_tokenizer().save(folder)
    with serving(folder, *OPTIONS) as served:
        wait_for(lambda: ready(served), 60)
        sizes: list[dict[int, int]] = []
        for seconds in rounds:
            before = totals(served)
            report = load(served, seconds)
            sys.stdout.write(f"{report}\n")  # for whoever wants the figures: pytest -s
            assert report["wrong"] == []
            assert report["requests"] >= STREAMS and report["hung_up"] > 0
            wait_for(lambda: totals(served)["vllm:num_requests_running"] == 0)
            after = totals(served)
            assert after["jaxserve_kv_used_blocks"] == after["vllm:num_requests_waiting"] == 0
            made = after["vllm:generation_tokens"] - before["vllm:generation_tokens"]
            # The first answers, unstreamed, are 100 tokens each; who hung up had some too.
            assert made > report["output_tokens"] + STREAMS * 100
            sizes.append(memory(served))
        first, last = sizes
        assert first.keys() == last.keys(), "a process was started again"
        grown = {pid: last[pid] - first[pid] for pid in last}
        assert max(grown.values()) < MOST_GROWTH, (first, last)


def load(served: Process, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.http_load", served.url, "--streams", f"{STREAMS}"]
    ran = subprocess.run(
        [*command, "--seconds", f"{seconds}"], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.stdout, ran.stderr
    return json.loads(ran.stdout)


def totals(served: Process) -> dict[str, float]:
    """The unlabelled figures, or sums over the labels."""
    found: dict[str, float] = {}
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    for family in text_string_to_metric_families(text):
        names = (family.name, f"{family.name}_total")
        found[family.name] = sum(x.value for x in family.samples if x.name in names)
    return found


def memory(served: Process) -> dict[int, int]:
    """Resident bytes of the server and of its children."""
    top = served.process.pid
    children = Path(f"/proc/{top}/task/{top}/children").read_text().split()
    return {pid: resident(pid) for pid in (top, *map(int, children))}


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
