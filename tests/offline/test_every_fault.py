"""At every single call of the file system: a failure, a full disk, a death, a power loss.  Then the
job is run again, and every line has its result exactly once, with the same text."""

import random

import pytest

from jaxserve.offline.files import Wishes
from jaxserve.offline.inputs import InputFile
from jaxserve.offline.output import Layout
from jaxserve.offline.storage import LocalStorage
from tests.offline import small_job
from tests.offline.disk import Died, Disk
from tests.offline.small_job import NOTHING, Attempt

COUNT = 7
KINDS = {
    "plain": (Layout("/job/out.jsonl"), None),
    "gzip": (Layout("/job/out.jsonl.gz"), None),
    "rolled": (Layout("/job/out.jsonl", rolled=True), 100),
}
EXPECTED = {f"id-{i}": f"{i}" * 7 for i in range(COUNT)} | {
    f"line-{COUNT + i}": "same" * 7 for i in (1, 2)
}


class Machine:
    """A disk with an input, and the job on it."""

    def __init__(self, kind: str) -> None:
        self.disk = Disk()
        self.disk.install("/job/in.jsonl", small_job.lines(COUNT))
        self.layout, self.roll_bytes = KINDS[kind]

    def run(self, wishes: Wishes = NOTHING, fails: tuple[str, ...] = ()) -> Attempt:
        attempt = Attempt()
        storage = LocalStorage(self.disk)  # type: ignore[arg-type]
        given = InputFile(storage, "/job/in.jsonl", "in.jsonl")
        try:
            small_job.run(
                storage,
                self.layout,
                given,
                attempt,
                wishes=wishes,
                fails=fails,
                roll_bytes=self.roll_bytes,
            )
        except (Died, OSError):
            pass
        return attempt

    def results(self) -> dict[str, str]:
        paths = [self.layout.output]
        if self.layout.rolled:
            paths = [self.layout.part(number) for number in range(1, 20)]
        return small_job.results([self.disk.read(path) for path in paths], self.layout.output)

    def finish(self) -> Attempt:
        """The next run, on a machine that is well again."""
        self.disk.disarm()
        attempt = self.run()
        assert attempt.completed
        assert self.results() == EXPECTED
        assert self.run().ran == []  # and there is nothing left to do
        return attempt


def calls_of(kind: str) -> list[str]:
    machine = Machine(kind)
    assert machine.run().completed
    assert machine.results() == EXPECTED
    return list(machine.disk.log)


CALLS = {kind: calls_of(kind) for kind in KINDS}


def test_the_calls_are_those_that_can_fail():
    assert {"open", "read", "write", "sync", "rename", "truncate", "mkdir"} <= set(CALLS["plain"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_once_is_repeated_and_loses_nothing(kind: str):
    """Also when a sync fails and the kernel forgets what it could not write."""
    for k in range(len(CALLS[kind])):
        machine = Machine(kind)
        machine.disk.arm("fails", k)
        assert machine.run().completed, (k, CALLS[kind][k])
        machine.disk.lose_power(random.Random(k))
        assert machine.results() == EXPECTED, (k, CALLS[kind][k])
        assert machine.finish().ran == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fills_up_at_any_call_loses_nothing(kind: str):
    for k in range(len(CALLS[kind])):
        machine = Machine(kind)
        machine.disk.arm("full", k)
        first = machine.run()
        second = machine.finish()
        assert not first.durable & set(second.ran), k


@pytest.mark.parametrize("kind", KINDS)
def test_b80_a_process_that_dies_at_any_call_is_resumed_exactly_once(kind: str):
    """Without a power loss nothing that was written is done again (of a compressed output: nothing
    that was synced)."""
    for k in range(len(CALLS[kind])):
        machine = Machine(kind)
        machine.disk.arm("dies", k)
        first = machine.run()
        second = machine.finish()
        safe = first.durable if kind == "gzip" else set(first.written)
        assert not safe & set(second.ran), (k, CALLS[kind][k])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_b80_a_power_loss_at_any_call_costs_one_sync_interval_at_most(kind: str, seed: int):
    for k in range(len(CALLS[kind])):
        machine = Machine(kind)
        machine.disk.arm("dies", k)
        first = machine.run()
        machine.disk.lose_power(random.Random(1000 * seed + k))
        second = machine.finish()
        assert not first.durable & set(second.ran), (k, CALLS[kind][k])


def test_b80_two_faults_in_a_row():
    """The run that resumes dies too, at every call of its own."""
    for first in range(0, len(CALLS["plain"]), 7):
        for k in range(len(CALLS["plain"])):
            machine = Machine("plain")
            machine.disk.arm("dies", first)
            before = machine.run()
            machine.disk.lose_power(random.Random(first))
            machine.disk.arm("dies", k)
            between = machine.run()
            machine.disk.lose_power(random.Random(k))
            after = machine.finish()
            assert not (before.durable | between.durable) & set(after.ran)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["fails", "full", "dies", "power"])
def test_a_rewrite_that_is_interrupted_at_any_call_leaves_the_old_or_the_new(kind: str, fault: str):
    """--retry-errors takes failed results out of the output: nothing else may go with them."""
    failing = ("id-1", "id-4")

    def failed_once() -> Machine:
        machine = Machine(kind)
        assert machine.run(fails=failing).completed
        machine.disk.disarm()
        machine.disk.log.clear()
        return machine

    probe = failed_once()
    assert sorted(probe.run(Wishes(retry_errors=True)).ran) == list(failing)
    assert probe.results() == EXPECTED
    for k in range(len(probe.disk.log)):
        machine = failed_once()
        machine.disk.arm("dies" if fault == "power" else fault, k)
        machine.run(Wishes(retry_errors=True))
        machine.disk.disarm()
        if fault == "power":
            machine.disk.lose_power(random.Random(k))
        again = machine.run(Wishes(retry_errors=True))
        assert again.completed, (k, probe.disk.log[k])
        assert set(again.ran) <= set(failing)
        assert machine.results() == EXPECTED, (k, probe.disk.log[k])
