"""`/v1/chat/completions` and `/v1/completions`."""

import asyncio
import logging
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from jaxserve.openai_api import answers
from jaxserve.server import connections, errors
from jaxserve.server.body import read_body
from jaxserve.server.exchange import Exchange
from jaxserve.server.protocol import Parsed
from jaxserve.server.service import Service
from jaxserve.server.streaming import Events, EventStream

_log = logging.getLogger(__name__)


class Completions:
    """One of the two routes (an ASGI app)."""

    def __init__(self, service: Service, *, is_chat: bool) -> None:
        self._service = service
        self._is_chat = is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError for what is refused before an answer began."""
        service, request = self._service, Request(scope, receive)
        service.check_door()
        limits = service.engine.config.server
        body = await read_body(request, limits.max_body_bytes, limits.idle_s)
        parsed = await service.text.parse("chat" if self._is_chat else "text", body)
        assert isinstance(parsed, Parsed)
        exchange = service.submit(parsed)
        exchange.cut = scope["extensions"][connections.CUT]["call"]
        watch = asyncio.create_task(self._watch(receive, exchange))
        try:
            if parsed.stream:
                await self._stream(parsed, exchange)(scope, receive, send)
            else:
                await self._answer(parsed, exchange, send)
        except TimeoutError:
            _log.warning("a reader of a stream takes nothing; it was dropped")
            exchange.cut()
        finally:
            watch.cancel()
            service.engine.abort(exchange)

    async def _watch(self, receive: Receive, exchange: Exchange) -> None:
        """Ends a request whose client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.engine.abort(exchange)

    def _stream(self, parsed: Parsed, exchange: Exchange) -> EventStream:
        service, name = self._service, uuid.uuid4().hex
        events = Events(
            parsed, service.tokenizer, model=service.names[0], name=name, is_chat=self._is_chat
        )
        send_s = service.engine.config.server.send_s
        return EventStream(exchange, events, send_s=send_s)

    async def _answer(self, parsed: Parsed, exchange: Exchange, send: Send) -> None:
        await exchange.finished()
        if exchange.cancelled:
            return
        if exchange.error is not None:
            raise errors.failed(exchange.error)
        body = answers.body(
            [generation.completion() for generation in exchange.generations],
            self._service.tokenizer,
            model=self._service.names[0],
            name=uuid.uuid4().hex,
            is_chat=self._is_chat,
            token_ids=parsed.return_token_ids,
        )
        await _send_json(send, body)


async def _send_json(send: Send, body: dict[str, Any]) -> None:
    data = msgspec.json.encode(body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})
