"""Lines for machines about what is served: one a request, and one an interval about the engine.

JSON objects on lines of their own; `event` tells them apart.  Never a prompt, an answer or a key.
"""

import asyncio
import contextlib
import dataclasses
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.engine_client import EngineClient
from jaxserve.server.tally import Tally

FACTS = "jaxserve.facts"  # in a scope: what the route adds to the line of its request
# Asked all the time: no line when all is well.
QUIET = frozenset({"/", "/health", "/ready", "/metrics"})
_NAMED = re.compile(r"(/v1/(?:files|batches|models))/.+?(/content|/cancel)?", re.DOTALL)
type Write = Callable[[dict[str, Any]], None]


class LogLines:
    """Lines on stderr, written by a thread: a reader of stderr that stands still holds up nobody.

    Beyond `most` unwritten ones lines are dropped; the next that is written says how many.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._waiting: queue.Queue[bytes | None] = queue.Queue(most)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Never waits.  Called by one thread."""
        try:
            if self._dropped:
                self._waiting.put_nowait(_line({"event": "dropped_lines", "count": self._dropped}))
                self._dropped = 0
            self._waiting.put_nowait(_line(line))
        except queue.Full:
            self._dropped += 1

    def close(self, seconds: float = 2.0) -> None:
        """Waits so long at most for what is not written yet."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(seconds)

    def _run(self) -> None:
        while (data := self._waiting.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                sys.stderr.write(data.decode())
                sys.stderr.flush()


def _line(facts: dict[str, Any]) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": now, **facts}) + b"\n"


class RequestLog:
    """Around an app: counts its answers and writes a line about each request."""

    def __init__(
        self, app: ASGIApp, tally: Tally, routes: frozenset[str], write: Write | None
    ) -> None:
        """`routes`: paths that are counted by name, the others together.  None writes nothing."""
        self._app = app
        self._tally = tally
        self._routes = routes
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = time.monotonic()
        facts: dict[str, Any] = {}
        scope[FACTS] = facts
        status, name, ended = 0, "", False

        async def watch(message: Message) -> None:
            nonlocal status, name, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                name = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                ended = True

        try:
            await self._app(scope, receive, watch)
        finally:
            route = self._route(scope["path"])
            self._tally.http[route, status] += 1  # 0: the client went before an answer
            if self._write is not None and not (route in QUIET and status == 200):
                self._write(
                    {
                        "event": "request",
                        "request_id": name or None,
                        "method": scope["method"],
                        "route": route,
                        "status": status or None,
                        "complete": ended,
                        "seconds": round(time.monotonic() - began, 6),
                        **facts,
                    }
                )

    def _route(self, path: str) -> str:
        found = _NAMED.fullmatch(path)
        if found:
            path = f"{found[1]}/{{name}}{found[2] or ''}"
        return path if path in self._routes else "other"


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """Sums at one moment."""

    at: float
    steps: int
    device_s: float
    tokens: int  # prefill and decode, recomputed ones included
    prompt: int
    output: int
    padded: int
    preempted: int

    @classmethod
    def of(cls, tally: Tally) -> "_Snapshot":
        totals = tally.steps.totals
        computed = totals.prefill_tokens + totals.recomputed_tokens + totals.decode_tokens
        return cls(
            at=time.monotonic(),
            steps=totals.steps,
            device_s=totals.device_s,
            tokens=computed,
            prompt=totals.prefill_tokens + totals.hit_tokens,
            output=totals.output_tokens,
            padded=totals.padded_tokens,
            preempted=totals.preemptions,
        )


def interval_line(engine: EngineClient, old: _Snapshot, new: _Snapshot) -> dict[str, Any]:
    """What happened between two moments with at least one step between them."""
    seconds, steps = new.at - old.at, new.steps - old.steps
    tokens, gauges = new.tokens - old.tokens, engine.gauges
    return {
        "event": "interval",
        "seconds": round(seconds, 3),
        "state": engine.state.value,
        "running": gauges.running,
        "waiting": gauges.waiting,
        "kv_usage": round(gauges.kv_used / gauges.kv_blocks, 4) if gauges.kv_blocks else 0.0,
        "steps": steps,
        "step_ms": round(1e3 * (new.device_s - old.device_s) / steps, 3),
        "prompt_tokens_per_s": round((new.prompt - old.prompt) / seconds, 1),
        "output_tokens_per_s": round((new.output - old.output) / seconds, 1),
        "budget_use": round(tokens / (steps * engine.tally.budget), 4),
        "padding": round((new.padded - old.padded) / (tokens + new.padded - old.padded), 4),
        "preemptions": new.preempted - old.preempted,
    }


async def log_intervals(engine: EngineClient, write: Write) -> None:
    """A line every `server.log_interval_s` in which the engine worked, until cancelled."""
    pause, tally = engine.config.server.log_interval_s, engine.tally
    old = _Snapshot.of(tally)
    while pause:
        await asyncio.sleep(pause)
        new = _Snapshot.of(tally)
        if new.steps > old.steps:
            write(interval_line(engine, old, new))
        old = new
