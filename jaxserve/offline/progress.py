"""How far a batch job is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable
from typing import Protocol, TextIO

LINE_SECONDS = 10.0  # between two lines where there is no terminal


class Progress(Protocol):
    """Shows counts; every figure is a total since the start."""

    def update(self, *, done: int, failed: int, tokens: int) -> None: ...

    def close(self) -> None: ...


def make_progress(total: int, stream: TextIO) -> Progress:
    """`total` lines of input; `stream` is where people look, usually stderr."""
    if stream.isatty():
        return Bar(total, stream)
    return Lines(total, stream)


class Lines:
    """One plain line every LINE_SECONDS."""

    def __init__(
        self, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._start = self._shown = clock()

    def update(self, *, done: int, failed: int, tokens: int) -> None:
        now = self._clock()
        if now - self._shown < LINE_SECONDS:
            return
        self._shown = now
        elapsed = now - self._start
        handled = done + failed
        eta = format_seconds((self._total - handled) * elapsed / handled) if handled else "?"
        self._stream.write(
            f"{done} done, {failed} failed, {self._total - handled} left; "
            f"{tokens / elapsed:,.0f} tok/s; ETA {eta}\n"
        )
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

    def update(self, *, done: int, failed: int, tokens: int) -> None:
        speed = tokens / max(1e-9, time.monotonic() - self._start)
        counts = f"{done} done  {failed} failed  {speed:,.0f} tok/s"
        self._bar.update(self._task, completed=done + failed, counts=counts)

    def close(self) -> None:
        self._bar.stop()


def format_seconds(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
