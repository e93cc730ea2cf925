"""An engine that works for a job somewhere else, here in this process."""

import json
import threading
import time
from collections.abc import Iterator

import pytest

from jaxserve.config import EngineConfig
from jaxserve.offline.crew import CrewJob, Lost
from jaxserve.offline.job import JobOptions, Outcome
from jaxserve.offline.jsonl import Line, Place
from jaxserve.offline.parse import Parser, encoder
from jaxserve.offline.progress import Snapshot
from jaxserve.offline.worker import Answer, EngineWorker
from jaxserve.request import SamplingParams
from tests.cli import fakes


def make() -> EngineWorker:
    assembly = fakes.assemble(EngineConfig())
    encode = encoder(assembly.tokenizer, assembly.config, any_model=False)
    return EngineWorker(assembly, Parser(SamplingParams(), encode), JobOptions())


@pytest.fixture
def worker() -> Iterator[EngineWorker]:
    made = make()
    yield made
    made.close()
    assert not any(t.name in ("jaxserve-worker", "jaxserve-reader") for t in threading.enumerate())


def lines(count: int) -> list[Line]:
    texts = [
        {"prompt": f"{i}" * (i % 5), "max_tokens": 4, "ignore_eos": True} for i in range(count)
    ]
    return [Line(Place(i + 1, i), json.dumps(text).encode()) for i, text in enumerate(texts)]


def test_every_line_has_one_result_and_figures_agree_with_the_results(worker: EngineWorker):
    given = lines(100)
    found: dict[int, Outcome] = {}
    done = 0
    while len(found) < 100:
        answer = worker.exchange([given.pop() for _ in range(min(7, len(given)))])
        for place, outcome, data in answer.results:
            assert place.index not in found
            assert json.loads(data)["id"] == f"batch_req_{place.number}"
            found[place.index] = outcome
            done += outcome is Outcome.DONE
        # Exactly those that were handed out: a lost worker's figures need no correction.
        assert (answer.totals.done, answer.totals.done + answer.totals.failed) == (done, len(found))
        assert answer.totals.output_tokens == 4 * done
    assert {index for index, outcome in found.items() if outcome is Outcome.FAILED} == set(
        range(0, 100, 5)
    )
    assert answer.use.engines == 1 and answer.use.steps > 0


def test_nothing_to_do_is_no_busy_loop(worker: EngineWorker):
    begun, cpu = time.monotonic(), time.process_time()
    answer = worker.exchange([])
    assert answer.results == () and answer.error is None
    assert time.monotonic() - begun > 0.4
    assert time.process_time() - cpu < 0.3


def test_a_broken_engine_says_so(monkeypatch: pytest.MonkeyPatch):
    def dispatch(self: object, batch: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(fakes.FakeRunner, "dispatch", dispatch)
    worker = make()
    answer = worker.exchange(lines(500))
    while answer.error is None:
        answer = worker.exchange([])
    assert "3 steps in a row failed" in answer.error
    worker.close()


class Local:
    """A crew of workers in this process; `lose` of them go one by one, with what they held."""

    def __init__(self, size: int, lose: int) -> None:
        self._workers = {number: make() for number in range(size)}
        self.members = range(size)
        self._asked: list[tuple[int, list[Line]]] = []
        self._lose, self._turn = lose, 0

    def send(self, member: int, lines: list[Line]) -> None:
        self._asked.append((member, lines))

    def wait(self, seconds: float) -> list[tuple[int, Answer | Lost]]:
        member, lines = self._asked.pop(0)
        answer = self._workers[member].exchange(lines)
        self._turn += 1
        if self._lose and self._turn % 5 == 0:
            self._lose -= 1
            return [(member, Lost("gone"))]  # and the answer with it
        return [(member, answer)]

    def replace(self, member: int) -> None:
        self._workers[member].close()
        self._workers[member] = make()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class Kept:
    def __init__(self) -> None:
        self.texts: dict[int, str] = {}

    def write(self, place: Place, outcome: Outcome, result: bytes) -> None:
        assert place.index not in self.texts
        value = json.loads(result)
        self.texts[place.index] = str(
            value["error"] or value["response"]["body"]["choices"][0]["text"]
        )

    def flush(self) -> None: ...

    def update(self, now: Snapshot) -> None: ...

    def close(self) -> None: ...


def test_texts_do_not_depend_on_how_many_work_and_who_is_lost():
    given = lines(150)
    kept = []
    for size, lose in ((1, 0), (3, 4)):
        crew, sink = Local(size, lose), Kept()
        job = CrewJob(crew, credit=20)  # type: ignore[arg-type]
        job.run(iter(given), sink, sink)
        crew.close()
        assert (job.redone > 0) == (lose > 0)
        kept.append(sink.texts)
    assert sorted(kept[0]) == list(range(150))
    assert kept[0] == kept[1]
