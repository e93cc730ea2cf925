"""An engine on hashes, and what the scheduler's tests ask of it."""

from jaxserve.batch.buckets import resolve
from jaxserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from jaxserve.engine import Engine, ModelLimits
from jaxserve.kv.groups import FULL
from jaxserve.metrics import StepRecord
from jaxserve.request import Request, SamplingParams
from tests.simulation.hash_runner import HashRunner

VOCAB = 50
MAX_LEN = 4096


def make(
    *, blocks: int = 400, block_size: int = 4, overlap: bool = True, seats: int = 16, **rules
) -> tuple[Engine, HashRunner, list[StepRecord]]:
    deterministic = rules.pop("deterministic", False)
    prefix_caching = rules.pop("prefix_caching", True)
    max_len = rules.pop("max_len", MAX_LEN)
    windows = rules.pop("windows", FULL)
    config = resolve(
        EngineConfig(
            model=ModelConfig(max_len=max_len),
            cache=CacheConfig(
                block_size=block_size, num_blocks=blocks, prefix_caching=prefix_caching
            ),
            scheduler=SchedulerConfig(max_seqs=seats, **{"token_budget": 64, **rules}),
            runner=RunnerConfig(overlap=overlap, deterministic=deterministic),
        ),
        MAX_LEN,
        1,
        windows=windows,
    )
    runner = HashRunner(blocks, block_size, config.scheduler.max_seqs, VOCAB, windows=windows)
    records: list[StepRecord] = []
    limits = ModelLimits(VOCAB, frozenset({3}), windows)
    engine = Engine(config, runner, limits, on_step=records.append)
    return engine, runner, records


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt + i * i) % VOCAB for i in range(length)]


def asks(max_tokens: int = 8, **more) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more}
    )


def drain(engine: Engine, most: int = 100_000) -> dict[Request, list[int]]:
    tokens: dict[Request, list[int]] = {}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request, []).extend(output.tokens)
        steps += 1
        assert steps < most, "no end"
    return tokens
