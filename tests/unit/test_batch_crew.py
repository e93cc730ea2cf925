"""A job by several workers: exactly once, whoever is lost and whenever.

The workers here are scripted; tests/ray has real ones.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.offline.crew import MAX_LOSSES, CrewJob, Lost
from jaxserve.offline.job import JobFailed, Outcome, Totals
from jaxserve.offline.jsonl import Line, Place
from jaxserve.offline.progress import Snapshot
from jaxserve.offline.report import EngineUse
from jaxserve.offline.worker import Answer, Result

CREDIT = 50


class Sink:
    def __init__(self) -> None:
        self.written: Counter[int] = Counter()
        self.flushes = 0

    def write(self, place: Place, outcome: Outcome, result: bytes) -> None:
        assert result == b"%d" % place.index
        self.written[place.index] += 1

    def flush(self) -> None:
        self.flushes += 1


class Silent:
    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def update(self, now: Snapshot) -> None:
        self.seen.append(now)

    def close(self) -> None: ...


@dataclasses.dataclass
class Scripted:
    """Workers that answer some of their lines in any order, and are lost now and then; one that is
    lost may have done lines that it never told of."""

    rng: random.Random
    size: int
    lost_share: float = 0.0
    bad: frozenset[int] = frozenset()
    for_good: bool = False

    def __post_init__(self) -> None:
        self.members: Sequence[int] = range(self.size)
        self.held: dict[int, list[Line]] = {n: [] for n in self.members}
        self.done: dict[int, int] = dict.fromkeys(self.members, 0)
        self.asked: list[int] = []
        self.most_held = 0
        self.replaced = 0

    def send(self, member: int, lines: Sequence[Line]) -> None:
        assert member not in self.asked
        self.held[member] += lines
        self.most_held = max(self.most_held, len(self.held[member]))
        self.asked.append(member)

    def wait(self, seconds: float) -> list[tuple[int, Answer | Lost]]:
        self.rng.shuffle(self.asked)
        ended, self.asked = self.asked[:1], self.asked[1:]
        return [(member, self._say(member)) for member in ended]

    def _say(self, member: int) -> Answer | Lost:
        if self.rng.random() < self.lost_share:
            return Lost("gone", self.for_good)
        held = self.held[member]
        self.rng.shuffle(held)
        count = self.rng.randint(0, len(held))
        ended, self.held[member] = held[:count], held[count:]
        self.done[member] += count
        results = tuple(
            Result(
                line.place,
                Outcome.FAILED if line.place.index in self.bad else Outcome.DONE,
                b"%d" % line.place.index,
            )
            for line in ended
        )
        total = self.done[member]
        return Answer(
            results,
            Totals(done=total, output_tokens=10 * total),
            EngineUse(engines=1, device_s=float(total)),
            Snapshot(done=total, failed=0, tokens=10 * total, kv_used=0.5),
            pid=member,
        )

    def replace(self, member: int) -> None:
        assert member not in self.asked
        self.replaced += 1
        self.held[member], self.done[member] = [], 0


def lines(count: int) -> list[Line]:
    return [Line(Place(i + 1, i), b"{}") for i in range(count)]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(0, 400),
    size=st.integers(1, 4),
    lost_share=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_every_line_is_written_once(seed: int, count: int, size: int, lost_share: float):
    crew = Scripted(random.Random(seed), size, lost_share)
    job, sink, progress = CrewJob(crew, credit=CREDIT), Sink(), Silent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxserve.offline.crew.MAX_LOSSES", 10**9)  # however often
        job.run(iter(lines(count)), sink, progress)
    assert sink.written == Counter(range(count))
    assert crew.most_held <= CREDIT
    now = job.snapshot()
    assert (now.done, now.failed) == (count, 0)
    # A lost worker's untold work is in no figure, its told work in all.
    assert job.totals.output_tokens == now.tokens == 10 * count
    assert (job.use.engines, job.use.device_s) == (size, count)
    assert (job.redone > 0) <= (crew.replaced > 0)
    assert [s.done for s in progress.seen] == sorted(s.done for s in progress.seen)


def test_lines_are_spread_before_anyone_has_many():
    crew = Scripted(random.Random(1), 4)
    job = CrewJob(crew, credit=1000)
    job.run(iter(lines(400)), Sink(), Silent())
    assert crew.most_held <= 128


def test_a_result_that_arrives_twice_is_written_once():
    crew, sink = Scripted(random.Random(2), 1), Sink()
    answer = crew._say

    def twice(member: int) -> Answer | Lost:
        said = answer(member)
        assert isinstance(said, Answer)
        return dataclasses.replace(said, results=said.results * 2)

    crew._say = twice  # type: ignore[method-assign]
    CrewJob(crew, credit=CREDIT).run(iter(lines(100)), sink, Silent())
    assert sink.written == Counter(range(100))


def test_workers_that_never_get_anywhere_end_the_job():
    crew = Scripted(random.Random(3), 2, lost_share=1.0)
    with pytest.raises(JobFailed, match="gone"):
        CrewJob(crew, credit=CREDIT).run(iter(lines(9)), Sink(), Silent())
    assert crew.replaced == MAX_LOSSES


def test_a_worker_that_cannot_start_ends_the_job_at_once():
    crew = Scripted(random.Random(3), 2, lost_share=1.0, for_good=True)
    with pytest.raises(JobFailed, match="gone"):
        CrewJob(crew, credit=CREDIT).run(iter(lines(9)), Sink(), Silent())
    assert crew.replaced == 0


def test_a_broken_engine_is_a_lost_worker():
    crew, sink = Scripted(random.Random(4), 2), Sink()
    say = crew._say
    broken = iter([True])

    def once(member: int) -> Answer | Lost:
        said = say(member)
        assert isinstance(said, Answer)
        return dataclasses.replace(said, error="no step works") if next(broken, False) else said

    crew._say = once  # type: ignore[method-assign]
    CrewJob(crew, credit=CREDIT).run(iter(lines(100)), sink, Silent())
    assert crew.replaced == 1
    assert sink.written == Counter(range(100))


def test_failed_lines_are_counted_and_limited():
    crew, sink = Scripted(random.Random(5), 2, bad=frozenset({3, 50, 60})), Sink()
    job = CrewJob(crew, credit=CREDIT, max_errors=3)
    job.run(iter(lines(100)), sink, Silent())
    assert (job.totals.done, job.totals.failed) == (97, 3)
    crew = Scripted(random.Random(5), 2, bad=frozenset({3, 50, 60}))
    with pytest.raises(JobFailed, match="more than 2 lines failed"):
        CrewJob(crew, credit=CREDIT, max_errors=2).run(iter(lines(100)), Sink(), Silent())


class StopAfter:
    expired = False

    def __init__(self, sink: Sink, count: int) -> None:
        self.sink, self.count = sink, count

    @property
    def asked(self) -> bool:
        return self.sink.written.total() >= self.count


def test_a_stop_finishes_what_was_handed_out():
    crew, sink = Scripted(random.Random(6), 2), Sink()
    given = iter(lines(1000))
    CrewJob(crew, credit=CREDIT).run(given, sink, Silent(), StopAfter(sink, 100))
    started = next(given).place.index
    assert sink.written == Counter(range(started))
    assert 100 <= started < 250


def test_a_stop_that_has_expired_waits_for_nobody():
    crew, sink = Scripted(random.Random(7), 2), Sink()
    stop = StopAfter(sink, 0)
    stop.expired = True
    CrewJob(crew, credit=CREDIT).run(iter(lines(10)), sink, Silent(), stop)
    assert not sink.written
