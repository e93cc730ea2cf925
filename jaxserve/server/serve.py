"""Runs the server from its start to its end."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from jaxserve.server import connections
from jaxserve.server.app import make_app
from jaxserve.server.engine_client import EngineFailed
from jaxserve.server.files_batches import FilesAndBatches
from jaxserve.server.request_log import LogLines, log_intervals
from jaxserve.server.service import Service

BACKLOG = 2048
_CUT_SECONDS = 5.0  # for answers that say that they were cut
_log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections; port 0 takes a free one.  Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run(
    service: Service,
    listener: socket.socket,
    files: FilesAndBatches | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> None:
    """Serves until SIGTERM or Ctrl-C, then drains.  Raises EngineFailed when the engine cannot
    start, OSError or TimeoutError when a text process cannot."""
    server = Server(service, files)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.run_until_stopped(listener, note))


class Server(uvicorn.Server):
    """uvicorn, with an end that is clean."""

    def __init__(self, service: Service, files: FilesAndBatches | None = None) -> None:
        limits = service.engine.config.server
        self._lines = LogLines()
        config = uvicorn.Config(
            make_app(service, files, self._lines.write),
            http=connections.protocol_class(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, int(limits.idle_s)),
            timeout_graceful_shutdown=int(limits.grace_s + _CUT_SECONDS) + 1,
        )
        super().__init__(config)
        self._service = service
        self._files = files
        self._grace_s = limits.grace_s
        self._failure: Exception | None = None

    async def run_until_stopped(self, listener: socket.socket, note: Callable[[str], None]) -> None:
        """See `run`."""
        service = self._service
        tasks = [
            asyncio.create_task(self._run_engine(note)),
            asyncio.create_task(self._start_text()),
            asyncio.create_task(log_intervals(service.engine, self._lines.write)),
        ]
        try:
            if self._files is not None:
                self._files.start()
            await self.serve([listener])
        finally:
            if self._files is not None:
                await self._files.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.text.close()
            self._lines.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Begins the end: takes nothing more, and cuts what is left after the grace time."""
        if self.should_exit:
            return
        self.should_exit = self._service.draining = True
        error = "the server is shutting down"
        asyncio.get_running_loop().call_later(self._grace_s, self._service.engine.fail_all, error)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT; the second one does not wait."""
        self.force_exit = self.should_exit
        self.stop()

    async def _start_text(self) -> None:
        try:
            await self._service.text.start()
        except (OSError, TimeoutError) as error:
            self._fail(error)

    async def _run_engine(self, note: Callable[[str], None]) -> None:
        engine = self._service.engine
        try:
            await engine.run()
            note("error: the engine has died; /health and /ready say so")
        except Exception as error:  # EngineFailed, or a fault of the server itself
            if not isinstance(error, EngineFailed):
                _log.exception("the server cannot go on")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends the server; `run` raises `error`."""
        self._failure = error
        self.stop()
