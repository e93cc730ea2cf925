"""Settings: what is read is what was written, and what is wrong is named."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import (
    DTYPES,
    MODES,
    POLICIES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from jaxserve.settings import SettingsError, dump, merge, read

_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
_CONFIGS = st.builds(
    EngineConfig,
    model=st.builds(ModelConfig, name=_NAMES, dtype=st.sampled_from(DTYPES)),
    cache=st.builds(CacheConfig, memory_gib=st.floats(0, 1e6), prefix_caching=st.booleans()),
    scheduler=st.builds(
        SchedulerConfig,
        mode=st.sampled_from(MODES),
        policy=st.sampled_from(POLICIES),
        token_budget=st.integers(1, 1 << 40),
        watermark=st.floats(0, 0.99),
    ),
    runner=st.builds(RunnerConfig, compile_cache=_NAMES),
)


@settings(derandomize=True, deadline=None)
@given(config=_CONFIGS)
def test_a_dumped_config_reads_back_equal(config: EngineConfig, tmp_path_factory):
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    path.write_text(dump(config), encoding="utf-8")
    assert read(path) == config


def test_later_sources_win(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text("[scheduler]\ntoken_budget = 100\nmax_seqs = 8\n")
    config = read(path, ["scheduler.token_budget=50", "scheduler.token_budget=60"])
    assert config.scheduler.token_budget == 60
    assert config.scheduler.max_seqs == 8
    assert config.cache == CacheConfig()


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("buckets.tokens=16,32", "buckets", "tokens", (16, 32)),
        ("buckets.tokens=[16, 32]", "buckets", "tokens", (16, 32)),
        ("buckets.tokens=", "buckets", "tokens", ()),
        ("model.name=a/b.gguf", "model", "name", "a/b.gguf"),
        ("model.name='quoted'", "model", "name", "quoted"),
        ("model.name=7", "model", "name", "7"),
        ("model.name=a=b", "model", "name", "a=b"),
        ("cache.memory_gib=2", "cache", "memory_gib", 2.0),
        ("cache.prefix_caching=false", "cache", "prefix_caching", False),
        (" scheduler.mode = fixed ", "scheduler", "mode", "fixed"),
    ],
)
def test_assignments(text: str, section: str, key: str, value: object):
    assert getattr(getattr(read(None, [text]), section), key) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scheduler.token_budgets=3", ["token_budgets", "did you mean scheduler.token_budget?"]),
        ("schedular.token_budget=3", ["[schedular]", "did you mean scheduler?"]),
        ("token_budget=3", ["no section", "did you mean scheduler.token_budget?"]),
        ("nonsense.key=1", ["[nonsense]", "model, cache, scheduler"]),
        ("cache.zzz=1", ["'zzz'", "block_size, num_blocks"]),
        ("scheduler.mode=magic", ["scheduler.mode='magic'", "dynamic, fixed"]),
        ("scheduler.token_budget=many", ["scheduler.token_budget", "'many'", "whole number"]),
        ("scheduler.token_budget=1.5", ["scheduler.token_budget", "whole number"]),
        ("scheduler.token_budget=true", ["scheduler.token_budget", "whole number"]),
        ("scheduler.token_budget=0", ["scheduler.token_budget=0", "at least 1"]),
        ("scheduler.watermark=nan", ["scheduler.watermark", "0 to 0.99"]),
        ("cache.prefix_caching=1", ["cache.prefix_caching", "true or false"]),
        ("buckets.tokens=a,b", ["buckets.tokens", "list of whole numbers"]),
        ("scheduler.token_budget=1\ncache.block_size=2", ["scheduler.token_budget"]),
        ("scheduler", ["section.key=value"]),
        ("=", ["section.key=value"]),
    ],
)
def test_errors_name_the_option_and_say_what_to_do(text: str, words: list[str]):
    with pytest.raises(SettingsError) as error:
        read(None, [text])
    for word in [f"--set {text}", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[scheduler]\nmax_seq = 3\n", ["max_seq", "did you mean scheduler.max_seqs?"]),
        ("max_seqs = 3\n", ["outside of any section", "did you mean scheduler.max_seqs?"]),
        ("scheduler = 3\n", ["scheduler is a section"]),
        ("[cache]\nmemory_gib = '2'\n", ["cache.memory_gib = '2'", "a number"]),
        ("[cache\n", ["not valid TOML"]),
        ("[[cache]]\nblock_size = 3\n", ["cache is a section"]),
    ],
)
def test_errors_name_the_file(toml: str, words: list[str], tmp_path: Path):
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    with pytest.raises(SettingsError) as error:
        read(path)
    for word in [str(path), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path):
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"c\.toml"):
        read(path)


def test_merge_takes_sections_as_values_and_leaves_its_argument_alone():
    base = EngineConfig()
    merged = merge(base, {"cache": CacheConfig(block_size=16), "model": {"dtype": "float32"}}, "x")
    assert (merged.cache.block_size, merged.model.dtype) == (16, "float32")
    assert base == EngineConfig()
    assert merged == dataclasses.replace(
        base, cache=CacheConfig(block_size=16), model=ModelConfig(dtype="float32")
    )
