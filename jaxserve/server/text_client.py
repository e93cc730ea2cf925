"""The server's side of the text processes: bodies in, token ids out."""

import asyncio
import dataclasses
import logging
import sys
from collections import deque
from collections.abc import Sequence

from jaxserve.server import errors, protocol
from jaxserve.server.children import Child
from jaxserve.server.errors import ApiError
from jaxserve.server.protocol import Answered, Codec, FromText, Load, Parsed, Rejected, ToText

COMMAND = (sys.executable, "-m", "jaxserve.server.text_process")
START_SECONDS = 120.0
REPLACE_SECONDS = 10.0  # so that whoever waits behind a body that is killed is not refused for it
DEPTH = 16  # bodies that one process has
_log = logging.getLogger(__name__)
_CODEC: Codec[FromText, ToText] = protocol.codec(FromText)
type TextChild = Child[FromText, ToText]


@dataclasses.dataclass(eq=False)
class _Asked:
    """One body."""

    message: protocol.Parse
    answer: asyncio.Future[FromText | None]  # None: two processes died of it
    sent: bool = False
    deaths: int = 0


class TextClient:
    """`count` processes, each with a few bodies at a time, so that one round through a busy event
    loop brings several of them on.  One that takes longer than `limit_s` seconds for a body is
    killed; the bodies behind that one go to another."""

    def __init__(
        self, load: Load, *, count: int, limit_s: float, command: Sequence[str] = COMMAND
    ) -> None:
        self.load = load
        self._limit_s = limit_s
        self._command = command
        self._count = count
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue()
        self._children: set[TextChild] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0
        self._started = False
        self.num_killed = 0

    @property
    def is_ready(self) -> bool:
        """The first process has started."""
        return self._started

    async def start(self) -> None:
        """Raises OSError or TimeoutError when a process does not start."""
        children = await asyncio.gather(*(self._start_one() for _ in range(self._count)))
        self._tasks = [asyncio.create_task(self._keep(child)) for child in children]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(child.end() for child in list(self._children)))

    async def parse(self, kind: str, body: bytes) -> Parsed | Answered:
        """Raises ApiError: 400 for a body that is wrong or takes too much, 503 when all processes
        are busy for too long."""
        self._number += 1
        future: asyncio.Future[FromText | None] = asyncio.get_running_loop().create_future()
        asked = _Asked(protocol.Parse(self._number, kind, body), future)
        self._queue.put_nowait(asked)
        try:
            while not future.done():
                await asyncio.wait([future], timeout=self._limit_s + REPLACE_SECONDS)
                if not (future.done() or asked.sent):
                    raise errors.unavailable("overloaded", "too many requests wait to be read")
            answer = future.result()
        finally:
            future.cancel()  # nobody waits any more
        if isinstance(answer, Rejected):
            raise errors.invalid(answer.code, answer.message, answer.param)
        if isinstance(answer, Parsed | Answered):
            return answer
        raise errors.invalid("unreadable", "the request could not be read: it takes too much")

    async def _keep(self, child: TextChild) -> None:
        """Has a process at work, the next one when it has to be killed."""
        while True:
            await self._serve(child)
            self.num_killed += 1
            self._children.discard(child)
            await child.end()
            child = await self._replacement()

    async def _serve(self, child: TextChild) -> None:
        """Until the process is of no use any more.  The body that it was at is asked once more if
        it died, for it may have been dead before; those behind it had no part in that."""
        under_way: deque[_Asked] = deque()
        while True:
            while len(under_way) < DEPTH and not (under_way and self._queue.empty()):
                asked = await self._queue.get()
                if not asked.answer.done():
                    asked.sent = True
                    child.send(asked.message)
                    under_way.append(asked)
            try:
                async with asyncio.timeout(self._limit_s):
                    answers = await child.receive()
            except TimeoutError:
                message = f"reading the request took longer than {self._limit_s:g} s"
                _end(under_way.popleft(), errors.invalid("too_slow", message))
                break
            except ValueError:  # it said what is no message: as good as dead
                answers = []
            for answer in answers:
                _end(under_way.popleft(), answer)
            if not answers:
                under_way[0].deaths += 1
                if under_way[0].deaths > 1:
                    _end(under_way.popleft(), None)
                break
        for asked in under_way:
            asked.sent = False
            self._queue.put_nowait(asked)

    async def _start_one(self) -> TextChild:
        child: TextChild = await Child.start(self._command, _CODEC)
        self._children.add(child)
        child.send(self.load)
        async with asyncio.timeout(START_SECONDS):
            loaded = await child.receive()
        if not loaded:
            raise OSError(f"the text process ended while it started ({await child.ended()})")
        self._started = True
        return child

    async def _replacement(self) -> TextChild:
        while True:
            try:
                return await self._start_one()
            except (OSError, TimeoutError) as error:
                _log.error("a text process does not start: %s", error)
                await asyncio.sleep(1.0)


def _end(asked: _Asked, answer: FromText | None | ApiError) -> None:
    if asked.answer.done():  # whoever asked has gone
        return
    if isinstance(answer, ApiError):
        asked.answer.set_exception(answer)
    else:
        asked.answer.set_result(answer)
