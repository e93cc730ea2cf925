"""Values are checked at the door: sampling parameters, settings, derived settings."""

import dataclasses
import math

import pytest

from jaxserve.batch.buckets import resolve, row_buckets, token_buckets
from jaxserve.config import (
    BucketConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SamplingConfig,
    SchedulerConfig,
)
from jaxserve.request import MAX_BIAS, MAX_EOS_IDS, SamplingParams
from jaxserve.scheduler.admission import ModelLimits

NOT_NUMBERS = ["0.5", None, [1], True]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, -1e-9, *NOT_NUMBERS])
def test_b58_temperature_refused(value: object) -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1e-12, 1e-7, 1e-5, 1e-4, 1e-2, 1, 2, 100])
def test_b58_temperature_accepted(value: float) -> None:
    assert SamplingParams(temperature=value).is_greedy == (value < 1e-4)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("top_k", [-1, 0, 1, 10**9], [-2, 1.0, "5", True, 2**31, math.nan]),
        ("top_p", [0, 1e-9, 0.5, 1, 1.0], [1.5, -0.1, math.nan, *NOT_NUMBERS]),
        ("min_p", [0, 0.3, 1], [2, -0.1, math.nan, *NOT_NUMBERS]),
        ("presence_penalty", [-2, 0, 2.0], [2.1, math.nan, math.inf, *NOT_NUMBERS]),
        ("frequency_penalty", [-2, 0, 2.0], [-2.1, math.nan, *NOT_NUMBERS]),
        ("repetition_penalty", [0.5, 1, 2.0], [0, -1, math.inf, math.nan, *NOT_NUMBERS]),
        ("max_tokens", [0, 1, 10**9], [-1, 1.0, None, True, math.nan]),
        ("logprobs", [None, 0, 20], [21, -1, 1.0, True]),
        ("prompt_logprobs", [None, 0, 20], [21, -1, "1", True]),
        ("n", [1, 64], [0, 65, 1.0, True]),
        ("seed", [None, 0, -1, 2**64 - 1], [2**64, 1.0, "1", True]),
        ("ignore_eos", [True, False], [1, None, "yes"]),
        (
            "stop",
            [(), ("a",), ("é" * 1000,)],
            [("",), "a", ["a"], (1,), ("a",) * 17, ("a" * 1025,)],
        ),
        ("stop_token_ids", [(), (1, 2)], [(-1,), (1.0,), (True,), [1], tuple(range(17))]),
        (
            "logit_bias",
            [{}, {5: 1.0, 7: -100}],
            [
                {"abc": 1},
                {-1: 1.0},
                {True: 1.0},
                {5: math.nan},
                {5: 1e9},
                {5: "1"},
                [1],
                dict.fromkeys(range(MAX_BIAS + 1), 1.0),
            ],
        ),
    ],
)
def test_b59_b61_b63_ranges(name: str, good: list, bad: list) -> None:
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=name.split("_")[0]):
            SamplingParams(**{name: value})


def test_min_tokens_within_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("section", "name", "bad"),
    [
        (ModelConfig, "dtype", "float16"),
        (ModelConfig, "name", ""),
        (ModelConfig, "max_len", -1),
        (CacheConfig, "block_size", 0),
        (CacheConfig, "num_blocks", -1),
        (CacheConfig, "memory_gib", math.nan),
        (CacheConfig, "prefix_caching", 1),
        (SchedulerConfig, "mode", "static"),
        (SchedulerConfig, "policy", "lifo"),
        (SchedulerConfig, "token_budget", 0),
        (SchedulerConfig, "token_budget", True),
        (SchedulerConfig, "token_budget", 1.5),
        (SchedulerConfig, "max_seqs", 0),
        (SchedulerConfig, "aging_steps", 0),
        (SchedulerConfig, "watermark", 1.0),
        (SchedulerConfig, "long_prefill_threshold", -1),
        (BucketConfig, "tokens", [8]),
        (BucketConfig, "rows", (0,)),
        (SamplingConfig, "random", "yes"),
        (SamplingConfig, "seed", -1),
        (RunnerConfig, "overlap", 1),
        (RunnerConfig, "compile_cache", ""),
    ],
)
def test_settings_name_what_is_wrong(section: type, name: str, bad: object) -> None:
    with pytest.raises(ValueError, match=name):
        section(**{name: bad})


@pytest.mark.parametrize("budget", [1, 5, 7, 8, 9, 64, 100, 512, 4097, 16640])
@pytest.mark.parametrize("max_seqs", [1, 7, 64, 256])
def test_derived_buckets(budget: int, max_seqs: int) -> None:
    tokens, rows = token_buckets(budget, max_seqs), row_buckets(max_seqs)
    for sizes, last in ((tokens, budget), (rows, max_seqs)):
        assert sizes[-1] == last and list(sizes) == sorted(set(sizes))
        assert min(sizes) >= min(8, last)
        # No step above the smallest bucket is more than double.
        assert all(b <= 2 * a for a, b in zip(sizes, sizes[1:], strict=False))
    decodes = [size for size in tokens if 16 <= size <= max_seqs]
    assert all(b <= 1.5 * a for a, b in zip(decodes, decodes[1:], strict=False))


def test_default_buckets_are_as_documented() -> None:
    assert token_buckets(512, 64) == (8, 16, 24, 32, 48, 64, 128, 256, 512)
    assert row_buckets(64) == (8, 16, 32, 64)
    fine = (1, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256, 512)
    assert token_buckets(512, 64, single=True) == fine
    assert token_buckets(12, 64, single=True) == row_buckets(12, single=True) == (1, 8, 12)
    assert token_buckets(1, 64, single=True) == row_buckets(1, single=True) == (1,)


def test_the_largest_token_bucket_is_the_budget_whatever_is_given() -> None:
    assert token_buckets(100, 8, (16, 256)) == (16, 100)
    assert token_buckets(100, 8, (16, 64)) == (16, 64, 100)
    assert row_buckets(12, (4, 99)) == (4, 12)


def _resolved(**sections: object) -> EngineConfig:
    return resolve(dataclasses.replace(EngineConfig(), **sections), 8192, 1 << 20)  # type: ignore[arg-type]


def test_resolve_leaves_nothing_to_derive_and_is_idempotent() -> None:
    config = _resolved()
    assert config.model.max_len == 8192 and config.cache.num_blocks == 2048
    assert config.scheduler.long_prefill_threshold == 328
    assert config.buckets.tokens[-1] == config.scheduler.token_budget
    assert resolve(config, 8192, 1 << 20) == config


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1])
def test_another_seed_changes_nothing_else(seed: int) -> None:
    asked = SamplingParams(max_tokens=3, stop=("a",), logit_bias={1: 2.0}, logprobs=4, seed=9)
    assert asked.with_seed(seed) == dataclasses.replace(asked, seed=seed)
    assert asked.seed == 9
    assert hash(asked.with_seed(9)) == hash(asked)
    for wrong in (2**64, -(2**63) - 1, 1.0, True):
        with pytest.raises(ValueError, match="seed"):
            asked.with_seed(wrong)  # type: ignore[arg-type]


def test_resolve_cuts_max_seqs_to_the_budget() -> None:
    config = _resolved(scheduler=SchedulerConfig(token_budget=5))
    assert config.scheduler.max_seqs == 5
    assert config.buckets == BucketConfig(tokens=(5,), rows=(5,))


def test_resolve_refuses_contradictions() -> None:
    with pytest.raises(ValueError, match="trained"):
        _resolved(model=ModelConfig(max_len=9000))
    with pytest.raises(ValueError, match="memory_gib"):
        resolve(EngineConfig(), 8192, 1 << 40)
    deterministic = RunnerConfig(deterministic=True)
    with pytest.raises(ValueError, match="deterministic"):
        _resolved(runner=deterministic, scheduler=SchedulerConfig(token_budget=300))
    with pytest.raises(ValueError, match="deterministic"):
        _resolved(runner=deterministic, scheduler=SchedulerConfig(chunk_size=16))


def test_deterministic_has_one_shape() -> None:
    config = _resolved(runner=RunnerConfig(deterministic=True))
    assert config.buckets == BucketConfig(tokens=(512,), rows=(64,))
    assert config.scheduler.chunk_size % config.cache.block_size == 0


def test_b74_too_many_eos_ids_are_refused() -> None:
    ModelLimits(1000, frozenset(range(MAX_EOS_IDS)))
    with pytest.raises(ValueError, match="EOS"):
        ModelLimits(1000, frozenset(range(MAX_EOS_IDS + 1)))
    assert ModelLimits(10, frozenset({3, 999})).eos_ids == {3}
