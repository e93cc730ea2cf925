"""The server's side of the text processes: bodies in, token ids out."""

import asyncio
import logging
import sys
from collections.abc import Sequence

from jaxserve.server import errors, protocol
from jaxserve.server.children import Child
from jaxserve.server.protocol import Answered, Codec, FromText, Load, Parsed, Rejected, ToText

COMMAND = (sys.executable, "-m", "jaxserve.server.text_process")
START_SECONDS = 120.0
_log = logging.getLogger(__name__)
_CODEC: Codec[FromText, ToText] = protocol.codec(FromText)


class TextClient:
    """`count` processes; each reads one body at a time, and is killed when it takes longer than
    `limit_s` seconds."""

    def __init__(
        self, load: Load, *, count: int, limit_s: float, command: Sequence[str] = COMMAND
    ) -> None:
        self.load = load
        self._limit_s = limit_s
        self._command = command
        self._count = count
        self._idle: asyncio.Queue[Child[FromText, ToText]] = asyncio.Queue()
        self._children: set[Child[FromText, ToText]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._started = False
        self.num_killed = 0

    @property
    def is_ready(self) -> bool:
        """The first process has started."""
        return self._started

    async def start(self) -> None:
        """Raises OSError or TimeoutError when a process does not start."""
        await asyncio.gather(*(self._start_one() for _ in range(self._count)))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(child.end() for child in list(self._children)))

    async def parse(self, kind: str, body: bytes) -> Parsed | Answered:
        """Raises ApiError: 400 for a body that is wrong or takes too much, 503 when all processes
        are busy for too long."""
        answer = await self._ask(kind, body)
        if answer is None:  # it may have been dead before
            answer = await self._ask(kind, body)
        if isinstance(answer, Rejected):
            raise errors.invalid(answer.code, answer.message, answer.param)
        if isinstance(answer, Parsed | Answered):
            return answer
        raise errors.invalid("unreadable", "the request could not be read: it takes too much")

    async def _ask(self, kind: str, body: bytes) -> FromText | None:
        """What one process answers; None: it died of it, or was dead."""
        try:
            async with asyncio.timeout(self._limit_s):
                child = await self._idle.get()
        except TimeoutError:
            raise errors.unavailable("overloaded", "too many requests wait to be read") from None
        self._number += 1
        answer: FromText | None = None
        try:
            child.send(protocol.Parse(self._number, kind, body))
            async with asyncio.timeout(self._limit_s):
                messages = await child.receive()
            answer = messages[0] if messages else None
        except TimeoutError:
            message = f"reading the request took longer than {self._limit_s:g} s"
            raise errors.invalid("too_slow", message) from None
        except ValueError:
            pass  # it said what is no message: as good as dead
        finally:
            if answer is None:
                self._replace(child)
            else:
                self._idle.put_nowait(child)
        return answer

    async def _start_one(self) -> None:
        child = await Child[FromText, ToText].start(self._command, _CODEC)
        self._children.add(child)
        child.send(self.load)
        async with asyncio.timeout(START_SECONDS):
            loaded = await child.receive()
        if not loaded:
            raise OSError(f"the text process ended while it started ({await child.ended()})")
        self._started = True
        self._idle.put_nowait(child)

    def _replace(self, child: Child[FromText, ToText]) -> None:
        self.num_killed += 1

        async def replace() -> None:
            self._children.discard(child)
            await child.end()
            while True:
                try:
                    return await self._start_one()
                except (OSError, TimeoutError) as error:
                    _log.error("a text process does not start: %s", error)
                    await asyncio.sleep(1.0)

        task = asyncio.get_running_loop().create_task(replace())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
