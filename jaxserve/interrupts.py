"""Ctrl-C between two steps of an engine, never inside one."""

import signal
import threading
from types import FrameType


class Uninterrupted:
    """A context in which Ctrl-C waits until its end, so that no state is left half changed.

    A second Ctrl-C is not made to wait: what hangs can still be ended.  Does nothing outside the
    main thread, where Python delivers no signals.
    """

    def __enter__(self) -> None:
        self._asked = False
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and not getattr(handler, "waits_by_itself", False):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._asked:
                self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked and self._handler is not None:
            self._handler(number, frame)
        self._asked = True
