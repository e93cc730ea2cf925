"""The end of a child process: a socket to the server that never makes the child wait."""

import os
import select
import signal
import socket
import threading

from jaxserve.server.protocol import Codec, Framer

MAX_UNSENT = 64 << 20  # bytes; a server that reads so little is gone
_READ = 1 << 20


class Pipe[In, Out]:
    """Messages over a socket, without blocking.  Any thread may send, one receives."""

    def __init__(self, connection: socket.socket, codec: Codec[In, Out]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._codec = codec
        self._framer = Framer()
        self._unsent = bytearray()
        self._sending = threading.Lock()

    def receive(self, wait_s: float | None) -> list[In]:
        """Messages that have arrived; waits for the first one `wait_s` at most, None: for ever.

        Raises EOFError when the server has gone.
        """
        self._flush()
        if wait_s is None or wait_s > 0:
            writing = [self._socket] if self._unsent else []
            select.select([self._socket], writing, [], wait_s)
        messages: list[In] = []
        try:
            while data := self._socket.recv(_READ):
                messages += self._codec.read(self._framer.feed(data))
            raise EOFError("the server has closed the connection")
        except BlockingIOError:
            return messages
        except ConnectionError as error:
            raise EOFError(str(error)) from error

    def send(self, message: Out) -> None:
        """Sends as much as the socket takes; the rest goes with later calls.

        Raises EOFError when the server has gone or reads nothing any more.
        """
        data = self._codec.write(message)
        with self._sending:
            self._unsent += data
        self._flush()
        if len(self._unsent) > MAX_UNSENT:
            raise EOFError(f"the server has not read {len(self._unsent)} bytes")

    def send_all(self, message: Out) -> None:
        """Like `send`, but waits until it is sent."""
        self.send(message)
        while self._unsent:
            select.select([], [self._socket], [])
            self._flush()

    def _flush(self) -> None:
        try:
            with self._sending:
                while self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError(str(error)) from error


def live_as_long_as(connection: socket.socket) -> None:
    """Signals meant for the server are left to it; when it is gone, this process ends, whatever it
    is doing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))  # POLLHUP is always reported

    def watch() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="server-gone", daemon=True).start()
