"""Reads ahead of the engine."""

import queue
import threading
from collections.abc import Callable, Iterable

from jaxserve.offline.jsonl import Line
from jaxserve.offline.parse import Failed, Ready

READ_AHEAD = 256  # lines that wait, parsed and tokenised, for the engine
WAIT_SECONDS = 0.1


class Reader:
    """A source of parsed and tokenised lines, worked at in a thread of its own at most READ_AHEAD
    lines ahead."""

    def __init__(self, lines: Iterable[Line], parse: Callable[[Line], Ready | Failed]) -> None:
        """`lines` is iterated, and `parse` called, in that thread."""
        self._lines = lines
        self._parse = parse
        self._queue: queue.Queue[Ready | Failed | BaseException | None] = queue.Queue(READ_AHEAD)
        self._stopped = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="jaxserve-reader", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Every line was taken."""
        return self._ended

    def take(self, *, wait: bool) -> Ready | Failed | None:
        """The next line in order; None at the end, or when none is ready yet (with `wait`: within
        WAIT_SECONDS, so that whoever takes can look at other things too).

        An OSError of the file comes out here.
        """
        if self._ended:
            return None
        try:
            item = self._queue.get(block=wait, timeout=WAIT_SECONDS)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._ended = item is None
        return item

    def stop(self) -> None:
        """Ends the thread.  Idempotent."""
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            for line in self._lines:
                if not self._put(self._parse(line)):
                    return
            self._put(None)
        except BaseException as error:  # whatever it is belongs to the thread that takes
            self._put(error)

    def _put(self, item: Ready | Failed | BaseException | None) -> bool:
        """False when nobody will take it."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
