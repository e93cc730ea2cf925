"""Streams against a server, all at once, with every token checked.

python -m tools.http_load URL --streams 256 --seconds 60   each stream asks again and again
python -m tools.http_load URL --workload W.jsonl           all lines at once, as `jaxserve bench`
python -m tools.http_load URL --workload W.jsonl --rate 2  Poisson arrivals, two requests a second

With a workload the server may be any that answers token ids (`return_token_ids`), vLLM's too.

Prints one JSON object: requests, tokens, tokens per second, time to first token and between events
(percentiles), and what was wrong.  A stream always asks the same with the same seed: what it gets
the first time, unstreamed, is what it must get ever after, token for token.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from jaxserve.offline.workload import read_workload

PATH = "/v1/completions"
_LIMIT = 1 << 20


@dataclasses.dataclass
class Figures:
    """Of all streams together; seconds."""

    seconds: float = 0.0
    requests: int = 0
    hung_up: int = 0
    refused: int = 0  # with 503, and asked again
    tokens: int = 0
    ttft: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "hung_up": self.hung_up,
            "refused": self.refused,
            "output_tokens": self.tokens,
            "wall_s": round(self.seconds, 3),
            "output_tokens_per_s": round(self.tokens / self.seconds, 1),
            "ttft_s": _percentiles(self.ttft, 1.0),
            "itl_ms": _percentiles(self.gaps, 1e3),
            "wrong": self.wrong[:20],
        }


class Refused(Exception):
    """The server has too much to do."""


class Client:
    """One connection, kept open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 80
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader

    async def post(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream; of an answer that is none, its body."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=_LIMIT)
        data = msgspec.json.encode(body)
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: load\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "content-length: " in answer:
            size = int(answer.partition("content-length: ")[2].split("\r\n")[0])
            text = await self._reader.readexactly(size)
            if " 503 " in answer[:20]:
                raise Refused
            if " 200 " not in answer[:20]:
                raise RuntimeError(f"{answer.splitlines()[0]}: {text[:300]!r}")
            yield msgspec.json.decode(text)
            return
        async for frame in self._frames():
            if frame != b"[DONE]":
                yield msgspec.json.decode(frame)

    async def _frames(self) -> AsyncIterator[bytes]:
        rest = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            rest += (await self._reader.readexactly(size + 2))[:-2]
            *frames, rest = rest.split(b"\n\n")
            for frame in frames:
                yield frame.removeprefix(b"data: ")
        await self._reader.readexactly(2)
        if rest:
            raise RuntimeError(f"the stream ended inside an event: {rest[:100]!r}")

    async def hang_up(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.transport.abort()
            await asyncio.sleep(0)


class Stream:
    """Asks for one thing and knows the answer."""

    def __init__(self, url: str, body: dict[str, Any], figures: Figures) -> None:
        self._client = Client(url)
        self._body = {**body, "ignore_eos": True, "return_token_ids": True}
        self._figures = figures
        self._expected: tuple[list[int], str] | None = None

    async def patiently(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Asks until the server takes it."""
        while True:
            try:
                return await ask()
            except Refused:
                self._figures.refused += 1
                await asyncio.sleep(1)

    async def first(self) -> None:
        """What it must get ever after."""
        async for answer in self._client.post(self._body):
            self._expected = answer["choices"][0]["token_ids"], answer["choices"][0]["text"]

    async def ask(self, leave_after: int | None = None) -> None:
        """Once, streamed; hangs up after so many tokens."""
        figures, ids, text = self._figures, list[int](), ""
        begun = last = time.perf_counter()
        async with contextlib.aclosing(self._client.post({**self._body, "stream": True})) as events:
            async for event in events:
                now = time.perf_counter()
                if "error" in event:
                    figures.wrong.append(str(event["error"]))
                    return
                for choice in event["choices"]:
                    (figures.gaps if ids else figures.ttft).append(now - (last if ids else begun))
                    ids += choice.get("token_ids") or ()
                    text += choice["text"]
                    last = now
                if leave_after is not None and len(ids) >= leave_after:
                    figures.hung_up += 1
                    await self.close()
                    return
        figures.requests += 1
        figures.tokens += len(ids)
        if self._expected is not None and self._expected != (ids, text):
            figures.wrong.append(f"{self._body}: {ids} instead of {self._expected[0]}")

    async def close(self) -> None:
        await self._client.hang_up()


async def load(url: str, streams: int, seconds: float, max_tokens: int, leaving: float) -> Figures:
    """`leaving`: the share of requests that hang up on the way."""
    figures = Figures()
    bodies = [
        {"prompt": f"{'ab' * (i % 40)} {i}", "max_tokens": max_tokens, "seed": i, "temperature": 1}
        for i in range(streams)
    ]
    clients = [Stream(url, body, figures) for body in bodies]
    await asyncio.gather(*(client.patiently(client.first) for client in clients))
    draw = random.Random(1)
    begun = time.perf_counter()

    async def again_and_again(client: Stream) -> None:
        while time.perf_counter() < begun + seconds:
            leaves = draw.random() < leaving
            after = draw.randrange(1, max_tokens) if leaves else None
            await client.patiently(lambda after=after: client.ask(after))

    await asyncio.gather(*map(again_and_again, clients))
    figures.seconds = time.perf_counter() - begun
    await asyncio.gather(*(client.close() for client in clients))
    return figures


async def replay(url: str, workload: Path, rate: float) -> Figures:
    """All lines at once, or as a Poisson process of `rate` requests a second, always the same."""
    figures = Figures()
    items = read_workload(workload)
    clients = [
        Stream(
            url,
            {"prompt": item.prompt_token_ids, "max_tokens": item.max_tokens, "temperature": 0},
            figures,
        )
        for item in items
    ]
    draw, sent, arrivals = random.Random(1), 0.0, list[float]()
    for _ in clients:
        arrivals.append(sent)
        sent += draw.expovariate(rate) if rate else 0.0

    async def after(seconds: float, client: Stream) -> None:
        await asyncio.sleep(seconds)
        await client.ask()

    begun = time.perf_counter()
    await asyncio.gather(*map(after, arrivals, clients))
    figures.seconds = time.perf_counter() - begun
    await asyncio.gather(*(client.close() for client in clients))
    return figures


def _percentiles(values: Sequence[float], unit: float) -> dict[str, float]:
    if not values:
        return {}
    points = np.percentile(np.array(values) * unit, [50, 99, 100])
    return dict(zip(("p50", "p99", "max"), map(float, points.round(4)), strict=True))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="streams against a server, every token checked")
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--leaving", type=float, default=0.05)
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: all at once")
    args = parser.parse_args(arguments)
    if args.workload is None:
        work = load(args.url, args.streams, args.seconds, args.max_tokens, args.leaving)
    else:
        work = replay(args.url, args.workload, args.rate)
    figures = asyncio.run(work)
    sys.stdout.write(msgspec.json.encode(figures.report()).decode() + "\n")
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
