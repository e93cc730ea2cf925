"""Server-sent events: what a stream of chunks is on the wire."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve.completion import Chunk
from jaxserve.openai_api import answers
from jaxserve.server import errors
from jaxserve.server.exchange import Exchange
from jaxserve.server.protocol import Parsed
from jaxserve.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on as they come
]


class Events:
    """Events of one request, in OpenAI's form."""

    def __init__(
        self, parsed: Parsed, tokenizer: Tokenizer, *, model: str, name: str, is_chat: bool
    ) -> None:
        self._parsed = parsed
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._head = answers.head(model=model, name=name, is_chat=is_chat, streamed=True)
        if parsed.include_usage:  # null in all events but the last
            self._head["usage"] = None
        self._choices: dict[int, answers.Choice] = {}  # that have begun

    def of(self, chunks: list[tuple[int, Chunk]], exchange: Exchange) -> Iterator[bytes]:
        """Events of what has come; nothing for a chunk that adds nothing yet."""
        asked = self._parsed
        for choice, chunk in chunks:
            if not (chunk.text or chunk.finish_reason or chunk.logprobs or asked.return_token_ids):
                continue
            if choice not in self._choices:
                yield from self._begin(choice, exchange)
            yield self._event(self._choices[choice].write(chunk))

    def end(self, exchange: Exchange) -> Iterator[bytes]:
        """The last events: the usage when it was asked for."""
        if self._parsed.include_usage:
            usages = [generation.completion().usage for generation in exchange.generations]
            yield _frame({**self._head, "choices": [], "usage": answers.usage(usages)})
        yield DONE

    def _begin(self, choice: int, exchange: Exchange) -> Iterator[bytes]:
        first = not self._choices
        self._choices[choice] = answers.Choice(
            choice,
            exchange.generations[choice // self._parsed.sampling.n].prompt,
            self._tokenizer,
            is_chat=self._is_chat,
            token_ids=self._parsed.return_token_ids,
        )
        if self._is_chat:
            delta = {"role": "assistant", "content": ""}
            yield self._event(
                {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
            )
        generation = exchange.generations[0]
        more: dict[str, Any] = {}
        if first and generation.prompt_logprobs is not None:
            entries = answers.prompt_logprobs(generation.prompt_logprobs, self._tokenizer)
            more["prompt_logprobs"] = entries
        if first and self._parsed.return_token_ids:
            more["prompt_token_ids"] = generation.prompt
        if more:
            yield _frame({**self._head, "choices": [], **more})

    def _event(self, choice: dict[str, Any]) -> bytes:
        return _frame({**self._head, "choices": [choice]})


class EventStream:
    """A response that sends events as they come (an ASGI app)."""

    def __init__(self, exchange: Exchange, events: Events, *, send_s: float) -> None:
        """A reader that takes nothing for `send_s` seconds is dropped."""
        self._exchange = exchange
        self._events = events
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises TimeoutError for a reader that takes nothing: the connection must be cut then."""
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        exchange = self._exchange
        while not exchange.cancelled:
            chunks = await exchange.take()
            events = b"".join(self._events.of(chunks, exchange))
            if exchange.error is not None:
                events += _frame(errors.failed(exchange.error).body()) + DONE
            elif exchange.done:
                events += b"".join(self._events.end(exchange))
            last = exchange.done or exchange.error is not None
            if events or last:
                async with asyncio.timeout(self._send_s):
                    await send(
                        {"type": "http.response.body", "body": events, "more_body": not last}
                    )
            if last:
                return


def _frame(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
