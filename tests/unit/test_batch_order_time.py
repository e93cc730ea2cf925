"""What the order of a batch job costs and gains: the job, engine and scheduler in virtual time."""

import math
import random
import types
from typing import Any

import pytest

from jaxserve.batch.buckets import resolve
from jaxserve.config import (
    BucketConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from jaxserve.costs import CostModel
from jaxserve.engine import Engine, ModelLimits
from jaxserve.lab.virtual import Clock, ShapeBuilder, VirtualRunner
from jaxserve.offline.job import Job, JobOptions
from jaxserve.offline.jsonl import Place
from jaxserve.offline.parse import Ready
from jaxserve.offline.progress import Silent
from jaxserve.openai_api.bodies import Task
from jaxserve.request import SamplingParams
from tests.cli.fakes import VOCAB, byte_tokenizer

SEATS, BLOCK, MAX_LEN = 64, 32, 1024
TOKENIZER = byte_tokenizer()
# A small model on a CPU: most of a step is its bucket.
COSTS = CostModel(tokens=(8, 64, 512), program=(0.006, 0.017, 0.125), single_context=4e-7)
ROOMY, TIGHT = SEATS * MAX_LEN // BLOCK, 190  # blocks

type Item = tuple[list[int], int]  # prompt, output tokens


def long_tailed(seed: int, count: int) -> list[Item]:
    """Lengths as of people's prompts and answers, no two prompts alike."""
    rng = random.Random(seed)

    def length(median: float, sigma: float, most: int) -> int:
        return max(8, min(most, int(rng.lognormvariate(math.log(median), sigma))))

    return [
        ([rng.randrange(256) for _ in range(length(80, 0.9, 600))], length(60, 1.0, 400))
        for _ in range(count)
    ]


class Listed:
    def __init__(self, items: list[Item]) -> None:
        self._items = items
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at == len(self._items)

    def take(self, *, wait: bool) -> Ready | None:
        if self.ended:
            return None
        index, (prompt, most) = self._at, self._items[self._at]
        self._at += 1
        sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        return Ready(Place(index + 1, index), f"{index}", Task(sampling, token_ids=prompt), prompt)


class Counted:
    lines = 0

    def write(self, *result: Any) -> None:
        self.lines += 1

    def flush(self) -> None: ...


def seconds(items: list[Item], blocks: int, *, in_order: bool) -> float:
    """Virtual time that the job takes with a pool of so many blocks."""
    asked = EngineConfig(
        model=ModelConfig(max_len=MAX_LEN),
        cache=CacheConfig(block_size=BLOCK, num_blocks=blocks),
        scheduler=SchedulerConfig(max_seqs=SEATS, token_budget=512),
        buckets=BucketConfig(tokens=COSTS.tokens),
        runner=RunnerConfig(overlap=False),
    )
    config, clock = resolve(asked, MAX_LEN, 1 << 20), Clock()
    limits = ModelLimits(VOCAB, frozenset())
    runner = VirtualRunner(clock, COSTS)
    engine = Engine(config, runner, limits, clock=clock, make_builder=ShapeBuilder)
    engine.set_costs(COSTS)
    assembly: Any = types.SimpleNamespace(engine=engine, tokenizer=TOKENIZER, config=config)
    sink = Counted()
    Job(assembly, JobOptions(in_order=in_order)).run(Listed(items), sink, Silent())
    assert sink.lines == len(items)
    return clock.now


def gain(items: list[Item], blocks: int) -> float:
    """What part of the time the default order saves."""
    return 1 - seconds(items, blocks, in_order=False) / seconds(items, blocks, in_order=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_default_order_never_loses_where_nothing_is_shared(seed: int):
    """A pool that is full before the seats are: sorted by length, long lines would run few at a
    time and be preempted late.  A roomy one: the long lines first, none of them runs alone."""
    items = long_tailed(seed, 250)
    assert gain(items, TIGHT) >= -0.002
    assert gain(items, ROOMY) >= 0.05


@pytest.mark.parametrize("blocks", [TIGHT, ROOMY])
def test_shared_prompts_gain_by_running_together(blocks: int):
    items = long_tailed(4, 60) * 5
    assert gain(items, blocks) >= 0.15
