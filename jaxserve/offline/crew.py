"""A job whose lines are run by several workers, any of which may be lost at any time.

Lines are handed out in blocks; a worker holds only so many.  Whoever runs this writes the results
and alone decides what is finished: a result counts when it arrives from a worker that is still
believed in and that holds the line.  The lines of a lost worker are handed out again, and nothing
that a lost worker may still say is listened to.  So every line is written exactly once.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from jaxserve.offline.job import JobFailed, Never, Outcome, Sink, Stop, Totals
from jaxserve.offline.jsonl import Line
from jaxserve.offline.progress import Progress, Snapshot
from jaxserve.offline.report import EngineUse
from jaxserve.offline.worker import Answer

BLOCK_LINES = 32  # handed out at a time
MAX_LOSSES = 3  # workers lost in a row without a result in between, and a job ends
WAIT_SECONDS = 0.5


class Lost(NamedTuple):
    """A worker is gone, or cannot be reached, which is the same."""

    reason: str
    for_good: bool = False  # another one would fail in the same way


class Crew(Protocol):
    """Workers by number.  One exchange a worker at a time."""

    @property
    def members(self) -> Sequence[int]: ...

    def send(self, member: int, lines: Sequence[Line]) -> None:
        """Begins an exchange."""
        ...

    def wait(self, seconds: float) -> list[tuple[int, Answer | Lost]]:
        """The exchanges that have ended."""
        ...

    def replace(self, member: int) -> None:
        """Puts a new worker in the place of a lost one, which is made sure to be gone."""
        ...


@dataclasses.dataclass(slots=True)
class _Member:
    held: dict[int, Line] = dataclasses.field(default_factory=dict[int, Line])  # by ordinal
    busy: bool = False  # an exchange is under way
    last: Answer | None = None


class CrewJob:
    """One run of a job by a crew."""

    def __init__(self, crew: Crew, *, credit: int, max_errors: int | None = None) -> None:
        """`credit`: lines a worker may hold."""
        self._crew = crew
        self._credit = credit
        self._max_errors = max_errors
        self._members = {number: _Member() for number in crew.members}
        self._again: deque[Line] = deque()  # of lost workers
        self._gone: list[Answer] = []  # the last word of each lost worker
        self._losses = 0  # in a row
        self._done = self._failed = 0
        self.redone = 0  # lines handed out again

    @property
    def totals(self) -> Totals:
        """Of the results that were written."""
        total = Totals(done=self._done, failed=self._failed)
        for answer in self._answers():
            total.prompt_tokens += answer.totals.prompt_tokens
            total.cached_tokens += answer.totals.cached_tokens
            total.output_tokens += answer.totals.output_tokens
            total.finish_reasons.update(answer.totals.finish_reasons)
        return total

    @property
    def use(self) -> EngineUse:
        """Of all engines, as far as they told; `engines` counts those of today."""
        total = sum((answer.use for answer in self._answers()), EngineUse())
        return dataclasses.replace(total, engines=len(self._members))

    @property
    def pids(self) -> dict[int, int]:
        """Process of each worker that has answered."""
        return {n: m.last.pid for n, m in self._members.items() if m.last is not None}

    def snapshot(self) -> Snapshot:
        now = [member.last.snapshot for member in self._members.values() if member.last]
        return Snapshot(
            done=self._done,
            failed=self._failed,
            tokens=sum(answer.snapshot.tokens for answer in self._answers()),
            running=sum(one.running for one in now),
            waiting=sum(one.waiting for one in now),
            kv_used=sum(one.kv_used for one in now) / len(now) if now else 0.0,
        )

    def run(
        self, lines: Iterator[Line], sink: Sink, progress: Progress, stop: Stop | None = None
    ) -> None:
        """Every line gets one result, unless `stop` asks for an early end.

        Raises JobFailed when workers are lost one after the other or too many lines failed, and
        what lines and sink raise.
        """
        stop = stop or Never()
        while not stop.expired:
            self._hand_out(lines, stop)
            if not any(member.busy for member in self._members.values()):
                break
            for number, said in self._crew.wait(WAIT_SECONDS):
                if isinstance(said, Lost):
                    self._lose(number, said)
                else:
                    self._take(number, said, sink)
            sink.flush()
            progress.update(self.snapshot())

    def _hand_out(self, lines: Iterator[Line], stop: Stop) -> None:
        """A block for each worker in turn, so that the last ones are spread evenly."""
        free = {number: member for number, member in self._members.items() if not member.busy}
        blocks: dict[int, list[Line]] = {number: [] for number in free}
        hungry = [] if stop.asked else list(free)
        while hungry:
            for number in list(hungry):
                held = len(free[number].held) + len(blocks[number])
                block = self._next(lines, min(BLOCK_LINES, self._credit - held))
                blocks[number] += block
                if not block:
                    hungry.remove(number)
        for number, member in free.items():
            member.held |= {line.place.index: line for line in blocks[number]}
            if member.held:
                member.busy = True
                self._crew.send(number, blocks[number])

    def _next(self, lines: Iterator[Line], count: int) -> list[Line]:
        found: list[Line] = []
        while len(found) < count:
            line = self._again.popleft() if self._again else next(lines, None)
            if line is None:
                break
            found.append(line)
        return found

    def _take(self, number: int, answer: Answer, sink: Sink) -> None:
        member = self._members[number]
        member.busy, member.last = False, answer
        for place, outcome, data in answer.results:
            if member.held.pop(place.index, None) is None:
                continue
            sink.write(place, outcome, data)
            self._losses = 0
            if outcome == Outcome.DONE:
                self._done += 1
            else:
                self._fail(str(place))
        if answer.error is not None:
            self._lose(number, Lost(answer.error))

    def _fail(self, where: str) -> None:
        self._failed += 1
        if self._max_errors is not None and self._failed > self._max_errors:
            raise JobFailed(f"more than {self._max_errors} lines failed, the last: {where}")

    def _lose(self, number: int, lost: Lost) -> None:
        member = self._members[number]
        self._losses += 1
        if lost.for_good or self._losses > MAX_LOSSES:
            raise JobFailed(f"worker {number} was lost: {lost.reason}")
        self.redone += len(member.held)
        self._again.extend(member.held.values())
        if member.last is not None:
            self._gone.append(member.last)
        self._members[number] = _Member()
        self._crew.replace(number)

    def _answers(self) -> list[Answer]:
        return self._gone + [m.last for m in self._members.values() if m.last is not None]
