"""The input of a batch job: looked through once before anything heavy starts, then read ahead."""

import queue
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.offline import tasks
from jaxserve.offline.jsonl import Line, LineError, parse_object, read_lines, shorten
from jaxserve.offline.parse import Failed, Ready
from jaxserve.offline.writer import InputError

READ_AHEAD = 256  # lines that wait, parsed and tokenised, for the engine
WAIT_SECONDS = 0.1


def scan(path: Path) -> int:
    """Number of lines that are not blank.

    Raises InputError when two lines have one custom_id, naming both.  Eight bytes a line are kept
    in memory.
    """
    hashes = array("Q")
    count = 0
    for line in read_lines(path):
        count += 1
        name = _quick_id(line)
        if name is not None:
            hashes.append(_hash(name))
    suspects = _repeated(hashes)
    if suspects:
        _refuse_duplicates(path, suspects)
    return count


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


class _Head(msgspec.Struct):
    """The only field of a line that the first look needs."""

    custom_id: Any = None


def _quick_id(line: Line) -> str | None:
    """`_custom_id`, ten times as fast: it may name an id for a line that has none, never the other
    way round, and whatever is found twice is looked at again."""
    try:
        name = msgspec.json.decode(line.data or b"", type=_Head).custom_id
        return name if isinstance(name, str) and name.encode() else _custom_id(line)
    except (ValueError, RecursionError):
        return _custom_id(line)


def _custom_id(line: Line) -> str | None:
    """None for a line that has no valid one: it becomes an error result when it is run."""
    try:
        return tasks.custom_id(parse_object(line), line.number)
    except LineError:
        return None


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8"), digest_size=8).digest())


def _repeated(hashes: array[int]) -> set[int]:
    ordered = np.sort(np.frombuffer(hashes, np.uint64))
    return set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())


def _refuse_duplicates(path: Path, suspects: set[int]) -> None:
    """Equal hashes are looked at again, so that only equal ids are refused."""
    first: dict[str, int] = {}
    for line, name in _named(path):
        if _hash(name) in suspects:
            if name in first:
                raise InputError(
                    f"{path}: lines {first[name]} and {line.number} have the same custom_id "
                    f"{shorten(name)}; give every line its own"
                )
            first[name] = line.number


def _named(path: Path) -> Iterator[tuple[Line, str]]:
    for line in read_lines(path):
        name = _custom_id(line)
        if name is not None:
            yield line, name
