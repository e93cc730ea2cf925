"""How far a batch job is: a bar on a terminal, a line now and then elsewhere."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

LINE_SECONDS = 10.0  # between two lines where there is no terminal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job at one moment; counts are totals since this run of it began."""

    done: int
    failed: int
    tokens: int  # put out, those of unfinished lines too
    running: int = 0  # samples with a seat
    waiting: int = 0  # samples without
    kv_used: float = 0.0  # share of the KV pool


class Progress(Protocol):
    """Shows snapshots."""

    def update(self, now: Snapshot) -> None: ...

    def close(self) -> None: ...


def make_progress(total: int, stream: TextIO) -> Progress:
    """`total` lines of input; `stream` is where people look, usually stderr."""
    if stream.isatty():
        return Bar(total, stream)
    return Lines(total, stream)


class Silent:
    """Shows nothing."""

    def update(self, now: Snapshot) -> None: ...

    def close(self) -> None: ...


class Several:
    """Shows the same in several places."""

    def __init__(self, places: Sequence[Progress]) -> None:
        self._places = places

    def update(self, now: Snapshot) -> None:
        for place in self._places:
            place.update(now)

    def close(self) -> None:
        for place in self._places:
            place.close()


class Lines:
    """One plain line every LINE_SECONDS."""

    def __init__(
        self, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._start = self._shown = clock()

    def update(self, now: Snapshot) -> None:
        time_now = self._clock()
        if time_now - self._shown < LINE_SECONDS:
            return
        self._shown = time_now
        self._stream.write(describe(now, self._total, time_now - self._start) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to take away."""


class Bar:
    """A bar that redraws itself."""

    def __init__(self, total: int, stream: TextIO) -> None:
        from rich.console import Console  # slow to import, and only a terminal needs it
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._start = time.monotonic()
        self._bar = RichProgress(
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[counts]}  ETA"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, counts="starting")
        self._bar.start()

    def update(self, now: Snapshot) -> None:
        speed = now.tokens / max(1e-9, time.monotonic() - self._start)
        counts = f"{now.done} done  {now.failed} failed  {speed:,.0f} tok/s  KV {now.kv_used:.0%}"
        self._bar.update(self._task, completed=now.done + now.failed, counts=counts)

    def close(self) -> None:
        self._bar.stop()


def describe(now: Snapshot, total: int, elapsed: float) -> str:
    """One line for people; `elapsed` seconds since the run began."""
    left = eta_seconds(now, total, elapsed)
    return (
        f"{now.done} done, {now.failed} failed, {max(0, total - now.done - now.failed)} left; "
        f"{now.tokens / max(1e-9, elapsed):,.0f} tok/s; "
        f"ETA {'?' if left is None else format_seconds(left)}; KV {now.kv_used:.0%}"
    )


def eta_seconds(now: Snapshot, total: int, elapsed: float) -> float | None:
    """At the pace so far; None before the first line has ended."""
    handled = now.done + now.failed
    return max(0, total - handled) * elapsed / handled if handled else None


def format_seconds(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
