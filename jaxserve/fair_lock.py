"""A lock that goes to whoever waits longest.

A thread that steps an engine releases its lock and takes it again within a microsecond; with
`threading.Lock` a thread that wants to submit between two steps could wait for ever.
"""

import threading
from collections import deque


class FairLock:
    """First come, first served.  Not reentrant.  Use as a context manager."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._gates: deque[threading.Lock] = deque()  # one closed gate a waiting thread
        self._held = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
        try:
            gate.acquire()
        except (
            BaseException
        ):  # Ctrl-C while waiting: nobody may hand the lock to a thread that left
            self._leave(gate)
            raise

    def __exit__(self, *error: object) -> None:
        with self._guard:
            if self._gates:
                self._gates.popleft().release()  # handed over: it stays held
            else:
                self._held = False

    def _leave(self, gate: threading.Lock) -> None:
        with self._guard:
            waiting = gate in self._gates
            if waiting:
                self._gates.remove(gate)
        if not waiting:  # it was handed over in the meantime
            self.__exit__()
