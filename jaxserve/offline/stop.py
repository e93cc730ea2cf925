"""SIGTERM and Ctrl-C in a batch job: the first asks it to end, the second ends it at once."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

PARKED = 75  # EX_TEMPFAIL: run the same command again
GRACE_SECONDS = 20.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """A signal came before the job ran."""


class StopSignals:
    """Asked after the first signal, expired `grace` seconds later.  A context manager.

    Until `begin` is called there is nothing to finish, and the first signal raises Interrupted.
    The second ends the process even when it hangs in a call: a thread watches.  Nothing is lost,
    because what the journal holds, holds.
    """

    waits_by_itself = True  # interrupts.Uninterrupted has nothing to hold back

    def __init__(self, grace: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace = grace
        self._clock = clock
        self._running = False
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def expired(self) -> bool:
        return self._asked_at is not None and self._clock() - self._asked_at >= self._grace

    def begin(self) -> None:
        """From now on a signal lets the job finish what it can."""
        self._running = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            reading, writing = self._pipe = os.pipe()
            os.set_blocking(writing, False)
            self._before = {number: signal.signal(number, self) for number in _SIGNALS}
            self._wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            watcher = threading.Thread(target=self._watch, args=(reading,), daemon=True)
            watcher.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            os.close(self._pipe[1])  # ends the watcher, which closes the other end
            self._pipe = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self._asked_at is None:
            self._asked_at = self._clock()
            if not self._running:
                raise Interrupted

    def _watch(self, reading: int) -> None:
        """Counts signals as they arrive, whatever the main thread does."""
        seen = 0
        while numbers := os.read(reading, 16):
            seen += sum(number in _SIGNALS for number in numbers)
            if seen > 1:
                os.write(2, b"jaxserve: stopped at once; run the same command again to go on\n")
                os._exit(PARKED)
        os.close(reading)
