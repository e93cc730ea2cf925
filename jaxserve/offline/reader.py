"""Reads ahead of the engine."""

import threading
from collections import deque
from collections.abc import Callable, Iterable

from jaxserve.offline.jsonl import Line
from jaxserve.offline.parse import Failed, Ready

READ_AHEAD = 256  # lines that wait, parsed and tokenised, for the engine
WAIT_SECONDS = 0.1


class Reader:
    """A source of parsed and tokenised lines, worked at in a thread of its own at most READ_AHEAD
    lines ahead.

    Neither thread takes a lock for a line unless it has to wait for the other one, or the other
    one may be waiting: the reader for a queue that is half empty, whoever takes for a first line.
    """

    def __init__(self, lines: Iterable[Line], parse: Callable[[Line], Ready | Failed]) -> None:
        """`lines` is iterated, and `parse` called, in that thread."""
        self._lines = lines
        self._parse = parse
        self._items: deque[Ready | Failed | BaseException | None] = deque()
        self._changed = threading.Condition()
        self._stopped = False
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
        items = self._items
        if self._ended or not (items or wait and self._wait_for_first()):
            return None
        item = items.popleft()
        if len(items) == READ_AHEAD // 2:
            self._notify()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._ended = item is None
        return item

    def stop(self) -> None:
        """Ends the thread.  Idempotent."""
        self._stopped = True
        self._notify()
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
        items = self._items
        if len(items) >= READ_AHEAD:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(items) <= READ_AHEAD // 2)
        items.append(item)
        if len(items) == 1:
            self._notify()
        return not self._stopped

    def _wait_for_first(self) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items), WAIT_SECONDS)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
