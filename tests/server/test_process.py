"""`jaxserve serve` as a process: start, signals, exit codes, and a real (tiny, random) model."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import save_file

from jaxserve.cli.main import main
from tests.cli import fakes
from tests.reference import tiny
from tests.server.rig import wait_for

ROOT = Path(__file__).parents[2]
FAKE = """
import functools, sys
from jaxserve import sources
from jaxserve.server import engine_client
engine_client.EngineClient = functools.partial(
    engine_client.EngineClient, command=(sys.executable, "-m", "tests.server.fake_engine")
)
from jaxserve.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
SLOW = FAKE.replace('fake_engine")', 'fake_engine", "0.02")')  # LONG takes five seconds
REAL = "import sys; from jaxserve.cli.main import main; sys.exit(main(sys.argv[1:]))"
LONG = {"prompt": "long", "max_tokens": 240, "ignore_eos": True}


class Process:
    """A server; its stderr is read all the time, as by a terminal."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        wait_for(lambda: bool(self.lines) or not self._reader.is_alive(), 60)
        found = re.search(r"http://\S+", "".join(self.lines[:1]))
        assert found, self.lines
        self.url = found[0]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(60)
        self._reader.join()
        return code, "".join(self.lines)


@contextmanager
def serving(folder: Path, *options: str, code: str = FAKE) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0", "--model", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    served = None
    try:
        served = Process(process)
        yield served
    finally:
        process.kill()
        process.wait(20)
        if served is not None:
            served.end()
        for pipe in (process.stderr, process.stdout):
            if pipe is not None:
                pipe.close()


def ready(served: Process) -> bool:
    assert served.process.poll() is None, served.end()
    return httpx.get(f"{served.url}/ready").status_code == 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fakes.byte_tokenizer().save(tmp_path)
    return tmp_path


def runs_one(served: Process) -> bool:
    metrics = httpx.get(f"{served.url}/metrics").text
    return re.search(r"^vllm:num_requests_running{.*} 1\.0$", metrics, re.MULTILINE) is not None


def answers(served: Process) -> bool:
    try:
        httpx.get(f"{served.url}/health")
    except httpx.TransportError:
        return False
    return True


def test_sigterm_lets_what_runs_finish_and_takes_nothing_more(folder: Path):
    with serving(folder, code=SLOW) as served:
        wait_for(lambda: ready(served), 60)
        got: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: got.append(served.post(LONG)))
        thread.start()
        wait_for(lambda: runs_one(served))
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not answers(served))
        assert thread.is_alive()
        thread.join()
        assert got[0].status_code == 200
        assert got[0].json()["usage"]["completion_tokens"] == 240
        code, err = served.end()
    assert code == 0, err
    assert err.splitlines()[-1] == "jaxserve: stopped"
    assert "Traceback" not in err


def test_sigterm_cuts_at_the_deadline_with_an_error(folder: Path):
    with serving(folder, "--set", "server.grace_s=0.2", code=SLOW) as served:
        wait_for(lambda: ready(served), 60)
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=LONG | {"stream": True}, timeout=60
        ) as stream:
            parts = stream.iter_bytes()
            data = next(parts)
            served.process.send_signal(signal.SIGTERM)
            data += b"".join(parts)
        assert b"shutting down" in data and data.endswith(b"data: [DONE]\n\n")
        code, err = served.end()
    assert code == 0, err


def test_no_process_is_left_when_the_server_is_killed(folder: Path):
    with serving(folder) as served:
        wait_for(lambda: ready(served), 60)
        children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()]
        assert len(pids) == 2
        served.process.kill()
        wait_for(lambda: not any(alive(pid) for pid in pids), 10)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/nowhere/at-all"], "/nowhere/at-all"),
        (["--port", "70000"], "70000"),
        (["--host", "256.1.1.1"], "256.1.1.1"),
        (["--api-key-file", "/nowhere/keys"], "--api-key-file"),
        (["--set", "server.idle_s=0"], "server.idle_s"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_2(
    options: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["serve", "--port", "0", "--model", str(folder), *options]))
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert words in err and len(err.splitlines()) == 1


def test_a_public_address_without_keys_is_warned_about(folder: Path):
    with serving(folder, "--host", "0.0.0.0") as served:
        wait_for(lambda: len(served.lines) > 1)
        assert "warning: whoever reaches 0.0.0.0" in served.lines[1]


def test_a_port_that_is_taken_is_exit_2(folder: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(folder), "--port", str(port)]) == 2
    assert "in use" in capsys.readouterr().err


def test_a_real_model_and_one_that_cannot_start(tmp_path: Path):
    """Weights are random; the answer is that of `generate` over the same folder."""
    config = tiny.CONFIGS["gqa_9_3"] | {"vocab_size": fakes.VOCAB}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tiny.make_weights(config, 3), tmp_path / "model.safetensors")
    fakes.byte_tokenizer().save(tmp_path)
    small = ["model.dtype=float32", "scheduler.token_budget=8", "scheduler.max_seqs=1"]
    small += ["buckets.tokens=8", "buckets.rows=1", "runner.prove=false", "sampling.random=false"]
    small += ["sampling.penalties=false", "sampling.logprobs=false"]
    options = [word for setting in small for word in ("--set", setting)]
    with serving(tmp_path, *options, code=REAL) as served:
        wait_for(lambda: ready(served), 100)
        answer = served.post({"prompt": "hello", "max_tokens": 8, "temperature": 0})
        served.process.send_signal(signal.SIGTERM)
        code, err = served.end()
    assert code == 0, err
    text = answer.json()["choices"][0]["text"]
    argv = ["generate", "hello", "--raw", "--max-tokens", "8", "--temperature", "0", "--model"]
    ran = subprocess.run(
        [sys.executable, "-c", REAL, *argv, str(tmp_path), *options],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
    )  # fmt: skip
    assert ran.stdout == text + "\n"
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with serving(tmp_path, *options, code=REAL) as served:
        code, err = served.end()
    assert code == 2 and "model.safetensors" in err and "Traceback" not in err
