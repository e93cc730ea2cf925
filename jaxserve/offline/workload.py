"""Recorded workloads: token ids in, times of token arrival out."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import msgspec

from jaxserve.driver import Driver, Generation
from jaxserve.offline.errors import InputError
from jaxserve.offline.jsonl import parse_object, read_lines
from jaxserve.openai_api.errors import RequestError
from jaxserve.request import SamplingParams

LATE_AFTER = 32  # output tokens of every earlier stream before the late requests are sent

type _Positive = Annotated[int, msgspec.Meta(ge=1)]


class WorkItem(msgspec.Struct, frozen=True):
    """One request of a workload: greedy, EOS ignored.  Fields of other tools, such as where a
    prompt came from, are let through."""

    id: int | str
    prompt_token_ids: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    max_tokens: _Positive
    arrive: str = "start"
    slo_class: str = ""

    @property
    def is_late(self) -> bool:
        return self.arrive != "start"


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """When what happened; seconds of one clock, item by item in the order of the workload."""

    start: float
    end: float
    submitted: list[float]
    times: list[list[float]]  # of each output token, as read by the host
    arrived: float | None  # when the late items were sent
    outputs: list[tuple[int, ...]]


def read_workload(path: Path) -> list[WorkItem]:
    """Raises InputError naming the line that is wrong."""
    items: list[WorkItem] = []
    try:
        for line in read_lines(path):
            try:
                items.append(msgspec.convert(parse_object(line), WorkItem))
            except (RequestError, msgspec.ValidationError) as error:
                raise InputError(f"{path}: line {line.number}: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot read the workload: {error.strerror}") from error
    _check(path, items)
    return items


def replay(driver: Driver, items: list[WorkItem]) -> Replay:
    """Submits all at once and the late ones when every earlier stream has LATE_AFTER tokens.

    Raises RuntimeError when an item did not get all of its tokens.
    """
    clock = time.perf_counter
    times: list[list[float]] = [[] for _ in items]
    submitted = [0.0] * len(items)
    place: dict[Generation, int] = {}
    early = [index for index, item in enumerate(items) if not item.is_late]
    late = [index for index, item in enumerate(items) if item.is_late]
    arrived: float | None = None

    def submit(index: int) -> None:
        item = items[index]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True, slo_class=item.slo_class
        )
        place[driver.submit(item.prompt_token_ids, sampling, text=False)] = index

    start = clock()
    for index in early:
        submitted[index] = clock()
        submit(index)
    while driver.num_running:
        events = driver.step()
        now = clock()
        for generation, chunk in events:
            times[place[generation]] += [now] * len(chunk.token_ids)
        if late and arrived is None and min(len(times[i]) for i in early) >= LATE_AFTER:
            arrived = clock()
            for index in late:
                submitted[index] = arrived
                submit(index)
    end = clock()
    outputs: list[tuple[int, ...]] = [()] * len(items)
    for generation, index in place.items():
        sample = generation.completion().outputs[0]
        outputs[index] = sample.token_ids
        if len(sample.token_ids) != items[index].max_tokens:
            raise RuntimeError(
                f"request {items[index].id} ended after {len(sample.token_ids)} of "
                f"{items[index].max_tokens} tokens: {sample.error or sample.finish_reason}"
            )
    return Replay(start, end, submitted, times, arrived, outputs)


def warm_up_items(items: list[WorkItem]) -> list[WorkItem]:
    """A short part of the workload that is run before anything is measured."""
    return [
        WorkItem(item.id, item.prompt_token_ids, min(8, item.max_tokens)) for item in items[:16]
    ]


def _check(path: Path, items: list[WorkItem]) -> None:
    early = [item for item in items if not item.is_late]
    if not early:
        raise InputError(f"{path}: no line arrives at the start; leave out arrive on some")
    if len({item.id for item in items}) < len(items):
        raise InputError(f"{path}: two lines have the same id")
    short = min(early, key=lambda item: item.max_tokens)
    if len(early) < len(items) and short.max_tokens < LATE_AFTER:
        raise InputError(
            f"{path}: request {short.id} ends after {short.max_tokens} tokens, but late lines wait "
            f"until every earlier one has {LATE_AFTER}"
        )
