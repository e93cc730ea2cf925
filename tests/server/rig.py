"""A whole server in this process, with child processes whose engine is arithmetic."""

import asyncio
import contextlib
import dataclasses
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from jaxserve import settings
from jaxserve.config import EngineConfig
from jaxserve.request import MAX_INT
from jaxserve.server import serve
from jaxserve.server.engine_client import EngineClient, Hooks, State
from jaxserve.server.files_batches import FilesAndBatches
from jaxserve.server.keys import Keys
from jaxserve.server.protocol import Load
from jaxserve.server.service import Service
from jaxserve.server.text_client import TextClient
from jaxserve.text.tokenizer import load_tokenizer
from tests.cli import fakes

ENGINE = (sys.executable, "-m", "tests.server.fake_engine")
SLOW_ENGINE = (*ENGINE, "0.02")  # a request of 240 tokens takes five seconds
MODEL = "fake-model"


@dataclasses.dataclass
class Rig:
    """A server that answers."""

    url: str
    service: Service
    server: serve.Server
    notes: list[str]
    thread: threading.Thread
    raised: list[BaseException]
    http: httpx.Client

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.v1, api_key=options.pop("api_key", "none"), max_retries=0, **options
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.v1, api_key="none", max_retries=0)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    @property
    def engine(self) -> EngineClient:
        return self.service.engine

    def is_idle(self) -> bool:
        """No request is anywhere, and no block of the KV is held."""
        gauges = self.engine.gauges
        return (
            self.engine.state is State.IDLE
            and not (gauges.running or gauges.waiting or gauges.kv_used)
            and not self.engine._exchanges
        )

    def canary(self) -> str:
        """The answer to a fixed request."""
        answer = self.post(
            "/v1/completions", json={"prompt": "canary", "max_tokens": 8, "temperature": 0}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def read_all(connection: socket.socket, until: bytes = b"") -> bytes:
    """All that comes, or all up to a piece with `until`."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            data += piece
            if until and until in data:
                break
    return data


@contextmanager
def running(
    folder: Path,
    *,
    keys: Keys | None = None,
    restart: bool = False,
    names: tuple[str, ...] = (MODEL,),
    engine: tuple[str, ...] = ENGINE,
    files: Path | None = None,
    wait: bool = True,
    **sections: Any,
) -> Iterator[Rig]:
    """A server over a model of `tests/cli/fakes.py`, whose tokenizer is written into `folder`."""
    folder.mkdir(exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        fakes.byte_tokenizer().save(folder)
    config = settings.merge(EngineConfig(), {"model": {"name": MODEL}, **sections}, "test")
    notes: list[str] = []
    load = Load(str(folder), list(names), chat_max_tokens=MAX_INT, text_max_tokens=16)
    service = Service(
        EngineClient(
            config,
            load_tokenizer(folder),
            restart=restart,
            command=engine,
            hooks=Hooks(note=notes.append),
        ),
        TextClient(load, count=1, limit_s=config.server.text_s),
        load_tokenizer(folder),
        list(names),
        keys,
    )
    listener = serve.listen("127.0.0.1", 0)
    batches = None if files is None else FilesAndBatches(service, files)
    server = serve.Server(service, batches)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            # Not uvloop: it forks for a child, and this process may have JAX threads.
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                loop.append(runner.get_loop())
                runner.run(server.run_until_stopped(listener, notes.append))
        except BaseException as error:
            raised.append(error)

    loop: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=run)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    http = httpx.Client(base_url=url, timeout=30, verify=False)
    rig = Rig(url, service, server, notes, thread, raised, http)
    try:
        if wait:
            wait_for(lambda: bool(raised) or (server.started and service.is_ready), 60)
            if raised:
                raise raised[0]
        yield rig
    finally:
        http.close()
        if not server.should_exit:
            loop[0].call_soon_threadsafe(server.stop)
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"
