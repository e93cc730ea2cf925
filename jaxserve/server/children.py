"""Child processes of the server, and the messages to and from them."""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Self

from jaxserve.server.protocol import Codec, Framer

_READ = 1 << 20
_STDERR = 2


class Child[In, Out]:
    """One process, started with the number of its end of a socket as its last argument."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        codec: Codec[In, Out],
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._codec = codec
        self._framer = Framer()

    @classmethod
    async def start(cls, command: Sequence[str], codec: Codec[In, Out]) -> Self:
        """Raises OSError when it cannot be started.  What it prints goes to stderr; signals of the
        terminal do not reach it."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=_STDERR,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return cls(process, reader, writer, codec)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Out) -> None:
        """Never waits; what a dead process is told is lost."""
        self._writer.write(self._codec.write(message))

    async def receive(self) -> list[In]:
        """The messages that have arrived, at least one; none at the end.

        Raises ValueError (msgspec.DecodeError is one) for what is no message.
        """
        while True:
            try:
                data = await self._reader.read(_READ)
            except ConnectionError:
                return []
            if not data:
                return []
            messages = self._codec.read(self._framer.feed(data))
            if messages:
                return messages

    async def ended(self) -> str:
        """Waits for its end: how it came."""
        code = await self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Whatever it does; `receive` comes to an end then.  Idempotent."""
        if self._process.returncode is None:
            try:
                os.kill(self._process.pid, 9)
            except ProcessLookupError:
                pass

    async def end(self) -> None:
        """Ends it.  Idempotent."""
        self._writer.close()
        self.kill()
        await self._process.wait()
