"""One engine that works for a job somewhere else: lines come in, results go out."""

import copy
import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.offline.job import Job, JobOptions, Outcome, Totals
from jaxserve.offline.jsonl import Line, Place
from jaxserve.offline.parse import Failed, Ready
from jaxserve.offline.progress import Silent, Snapshot
from jaxserve.offline.reader import Reader
from jaxserve.offline.report import EngineUse

if TYPE_CHECKING:
    from jaxserve.build import Assembly

ANSWER_SECONDS = 0.5  # an exchange waits as long for a first result


class Result(NamedTuple):
    """How one line ended."""

    place: Place
    outcome: Outcome
    data: bytes  # a JSON object without a line end


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Results since the answer before, and figures since the start that cover exactly the results
    handed out so far."""

    results: tuple[Result, ...]
    totals: Totals
    use: EngineUse
    snapshot: Snapshot
    pid: int
    error: str | None = None  # the engine is broken; no more results will come


class EngineWorker:
    """Runs a job over the lines it is given, in a thread of its own."""

    def __init__(
        self,
        assembly: "Assembly",
        parse: Callable[[Line], Ready | Failed],
        options: JobOptions,
    ) -> None:
        self._job = Job(assembly, options)
        self._inbox: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._outbox = _Outbox(self._job)
        self._source = Reader(self._arrivals(), parse)
        self._stop = _Stop()
        self._thread = threading.Thread(target=self._run, name="jaxserve-worker", daemon=True)
        self._thread.start()

    def exchange(self, lines: Sequence[Line]) -> Answer:
        """Takes lines, and answers as soon as there are results, or none for ANSWER_SECONDS."""
        for line in lines:
            self._inbox.put(line)
        return self._outbox.empty(ANSWER_SECONDS)

    def close(self) -> None:
        """Gives up what is unfinished.  Idempotent."""
        self._stop.asked = self._stop.expired = True
        self._inbox.put(None)
        self._source.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._job.run(self._source, self._outbox, Silent(), self._stop)
        except BaseException as error:  # belongs to whoever exchanges
            self._outbox.fail(f"{type(error).__name__}: {error}")

    def _arrivals(self) -> Iterator[Line]:
        while (line := self._inbox.get()) is not None:
            yield line


class _Outbox:
    """A sink.  Figures are taken at each flush, when they agree with the results."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._written: list[Result] = []  # of this step; the job's thread alone
        self._ready: list[Result] = []
        self._error: str | None = None
        self._measure()

    def write(self, place: Place, outcome: Outcome, result: bytes) -> None:
        self._written.append(Result(place, outcome, result))

    def flush(self) -> None:
        with self._changed:
            self._ready += self._written
            self._written.clear()
            self._measure()
            self._changed.notify_all()

    def fail(self, error: str) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def empty(self, wait_s: float) -> Answer:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None, wait_s)
            results, self._ready = self._ready, []
            return Answer(
                tuple(results), self._copy, self._use, self._snapshot, os.getpid(), self._error
            )

    def _measure(self) -> None:
        self._copy = copy.deepcopy(self._job.totals)
        self._use = self._job.use
        self._snapshot = self._job.snapshot()


class _Stop:
    asked = False
    expired = False
