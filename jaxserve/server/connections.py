"""Bounds of a connection that the HTTP library leaves open: how many, how long headers are and
take, and who is there at all."""

import asyncio
import contextlib
import socket
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve.config import ServerConfig

MAX_HEADERS = 100
CUT = "jaxserve.cut"  # the extension that ends a connection without a word
_PROBE_SECONDS = 60  # a connection silent for so long is asked whether anybody is there
_UNSENT_BYTES = 128 * 1024  # of a connection that the system holds; more waits in bounds of ours
_LINGER_S = 2.0  # for what a client still sends after it was refused
_REASONS = {431: "Request Header Fields Too Large", 503: "Service Unavailable"}


def protocol_class(limits: ServerConfig) -> type[asyncio.Protocol]:
    """The protocol for uvicorn, with `limits`."""

    class Bounded(BoundedProtocol):
        bounds = limits

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """A request's headers have `idle_s` seconds to come; a request beyond a bound is answered with
    431, a connection too many with 503, and both are closed."""

    bounds = ServerConfig()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]
        self._refused = False
        self._unsent = sys.maxsize  # bytes, when last looked at
        self._in_headers = True
        self._header_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        _set_options(transport.get_extra_info("socket"))
        if len(self.connections) > self.bounds.max_connections:
            self._refuse(503, "too many connections", b"retry-after: 1\r\n")
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            self._header_bytes += len(data)
            if self._timer is None:
                self._arm()
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.bounds.max_header_bytes:
            self._refuse(431, "the headers are too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CUT: {"call": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._disarm()
        self._in_headers, self._header_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or size > self.bounds.max_header_bytes:
            self._refuse(431, "the headers are too long or too many")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers = True  # of the next request
        if not self._refused:
            super().on_message_complete()

    @property
    def is_sending(self) -> bool:
        """Is the client in the middle of a request, as far as we know?"""
        return self._refused or not self._in_headers

    def stop_listening(self) -> None:
        """What still comes is thrown away."""
        self._refused = True

    def on_response_complete(self) -> None:
        self._unsent = sys.maxsize
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """A reader that has taken nothing of the last answer meanwhile is cut off."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            super().timeout_keep_alive_handler()
        elif unsent < self._unsent:
            self._unsent = unsent
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str, header: bytes = b"") -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        body = b'{"error":{"message":"%s","type":"%s","param":null,"code":null}}' % (
            message.encode(),
            b"server_error" if status >= 500 else b"invalid_request_error",
        )
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s"
            b"connection: close\r\n\r\n%s"
            % (status, _REASONS[status].encode(), len(body), header, body)
        )
        self.transport.close()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.bounds.idle_s, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self.transport.close()


class _Lingering:
    """A transport whose `close` lets a client that still sends read its answer.

    Closing a socket with unread bytes resets the connection, and the reset overtakes the answer
    (RFC 9112, section 9.6): so the end is announced, and what comes is read and dropped for
    `_LINGER_S`, or until the client closes its side.
    """

    def __init__(self, wire: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self._wire = wire
        self._protocol = protocol
        self._lingers = False
        self.write = wire.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)

    def is_closing(self) -> bool:
        return self._lingers or self._wire.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not (self._protocol.is_sending and self._wire.can_write_eof()):
            self._wire.close()
            return
        self._lingers = True
        self._protocol.stop_listening()
        self._wire.write_eof()
        self._wire.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_S, self._wire.abort)


def _set_options(connection: Any) -> None:
    """The other end of a connection may be gone without a word (a half-open socket), and the
    system would take megabytes for a client that reads nothing."""
    options = (("TCP_KEEPIDLE", _PROBE_SECONDS), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    options += (("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
