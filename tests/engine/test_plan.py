"""What a config comes to with a model is known before a weight is read, and is what then runs."""

import dataclasses
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve import build, settings, sources
from jaxserve.cli.main import main
from jaxserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SamplingConfig,
    SchedulerConfig,
)
from jaxserve.runner import dtypes
from jaxserve.runner.sharding import Sharding
from model_zoo.weights import open_checkpoint
from tests.equivalence.rig import write_tokenizer
from tests.models.weight_files import write_folder
from tests.reference import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "model"
    config = tiny.CONFIGS["mha"]
    write_folder(path, config | {"head_dim": 16}, tiny.make_weights(config, seed=1))
    write_tokenizer(path)
    return path


def test_the_plan_is_what_runs(folder: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(name=str(folder)),
        cache=CacheConfig(memory_gib=0.0005),
        scheduler=SchedulerConfig(token_budget=16, max_seqs=4),
        sampling=SamplingConfig(random=False, penalties=False),
        runner=RunnerConfig(prove=False, compile_cache="off"),
    )
    plan = build.plan(config, open_checkpoint(folder).hf_config)
    assert plan.config.cache.num_blocks == int(0.0005 * 2**30) // plan.block_bytes
    assembly = build.assemble(config)
    try:
        runner = assembly.runner
        assert plan.config == assembly.config
        assert sorted(spec.name for spec in plan.step().specs()) == sorted(
            program.spec.name for program in runner.manifest
        )
        assert plan.weight_bytes == _size(runner.weights)
        assert plan.block_bytes * plan.config.cache.num_blocks == _size(runner.state.kv)
        assert plan.blocks_per_row == runner.step.blocks_per_row == 256 // 32
    finally:
        assembly.close()


def _leaves(tree: object) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


def _size(tree: object) -> int:
    return sum(leaf.nbytes for leaf in _leaves(tree))


def test_config_says_what_settings_come_to(folder: Path, capsys, monkeypatch) -> None:
    """Beside what was set, as comments: the text still reads back as the same settings."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was fetched or loaded")

    for module, name in ((sources, "resolve"), (sources, "pull"), (build, "load_module")):
        monkeypatch.setattr(module, name, refuse)
    options = ["--set", "cache.memory_gib=0.0005", "--set", "scheduler.token_budget=16"]
    assert main(["config", "--model", str(folder), *options]) == 0
    text = capsys.readouterr().out
    asked = settings.merge(EngineConfig(), {"cache": {"memory_gib": 0.0005}}, "test")
    plan = build.plan(
        dataclasses.replace(
            asked,
            model=ModelConfig(name=str(folder)),
            scheduler=SchedulerConfig(token_budget=16),
        ),
        open_checkpoint(folder).hf_config,
    )
    printed = tomllib.loads(text)
    assert printed["cache"]["num_blocks"] == printed["model"]["max_len"] == 0
    lines = text.splitlines()
    assert f"num_blocks = 0  # here: {plan.config.cache.num_blocks}" in lines
    assert "max_len = 0  # here: 256" in lines
    assert f'dtype = "auto"  # here: "{dtypes.default_dtype("cpu")}"' in lines
    assert "# block table: 16 rows of 8 blocks" in lines
    assert f"#   backbone: {', '.join(map(str, plan.config.buckets.tokens))}" in lines


@pytest.mark.parametrize(
    ("dtype", "tokens", "rows"),
    [("float32", (1, 8, 16), (1, 8, 16)), ("bfloat16", (8, 16), (8, 16))],
)
def test_float32_on_a_cpu_has_programs_of_one_token(
    folder: Path, dtype: str, tokens: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    """A product with one row reads the weights once; with two to eight rows it takes double."""
    config = EngineConfig(
        model=ModelConfig(name=str(folder), dtype=dtype), scheduler=SchedulerConfig(token_budget=16)
    )
    buckets = build.plan(config, open_checkpoint(folder).hf_config).config.buckets
    assert (buckets.tokens, buckets.rows) == (tokens, rows)


@pytest.mark.parametrize(
    ("model", "cache", "expected"),
    [
        ("auto", "auto", ("float32", "bfloat16")),
        ("float32", "auto", ("float32", "float32")),
        ("bfloat16", "auto", ("bfloat16", "bfloat16")),
        ("auto", "float32", ("float32", "float32")),
        ("bfloat16", "float32", ("bfloat16", "float32")),
    ],
)
def test_what_auto_types_mean_on_a_cpu_without_bfloat16(
    folder: Path, monkeypatch, model: str, cache: str, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(build, "default_dtype", lambda platform: "float32")
    config = EngineConfig(
        model=ModelConfig(name=str(folder), dtype=model), cache=CacheConfig(dtype=cache)
    )
    made = build.plan(config, open_checkpoint(folder).hf_config)
    assert (made.config.model.dtype, made.config.cache.dtype) == expected
    exact = dataclasses.replace(config, cache=CacheConfig(dtype="float32"))
    whole = build.plan(exact, open_checkpoint(folder).hf_config)
    share = 1 if expected[1] == "float32" else 2
    assert whole.block_bytes == share * made.block_bytes


def test_float32_weights_serve_over_bfloat16_kv(folder: Path) -> None:
    """Through every bucket alike, and the KV has the type it was given."""
    config = EngineConfig(
        model=ModelConfig(name=str(folder), dtype="float32"),
        cache=CacheConfig(num_blocks=40, dtype="bfloat16"),
        scheduler=SchedulerConfig(token_budget=8, max_seqs=2),
        sampling=SamplingConfig(random=False, penalties=False, logprobs=False),
        runner=RunnerConfig(prove=True, compile_cache="off"),
    )
    assembly = build.assemble(config)
    try:
        runner = assembly.runner
        assert {leaf.dtype.name for leaf in _leaves(runner.state.kv)} == {"bfloat16"}
        assert runner.state.hidden.dtype.name == "float32"
        assert _size(runner.state.kv) == 40 * build.block_bytes_of(
            runner.step.model_config, runner.config
        )
    finally:
        assembly.close()


@pytest.mark.parametrize(
    ("facts", "has"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd i8mm bf16\n", True),
        ("flags : fpu avx2 avx512f avx512bw\nbugs : avx512_bf16\n", False),
        ("", False),
    ],
)
def test_a_cpu_without_bfloat16_arithmetic_takes_float32(facts: str, *, has: bool) -> None:
    assert dtypes.has_bfloat16(facts) is has
    assert dtypes.default_dtype("tpu") == dtypes.default_dtype("gpu") == "bfloat16"


def test_settings_that_the_model_contradicts_are_bad_usage(folder: Path, capsys) -> None:
    assert main(["config", "--model", str(folder), "--set", "model.max_len=257"]) == 2
    assert "above the 256 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("platform", "capability", "kernels", "lines"),
    [
        ("cpu", None, "xla", 0),
        ("tpu", None, "auto", 0),
        ("gpu", "9.0", "auto", 0),
        ("gpu", "8.9", "xla", 1),
        ("gpu", "10.0", "xla", 1),
        ("gpu", "gfx942", "xla", 1),
    ],
)
def test_kernels_are_those_of_the_devices_that_are_compiled_for(
    platform: str, capability: str | None, kernels: str, lines: int
) -> None:
    device = SimpleNamespace(platform=platform, device_kind="Some Chip")
    if capability:
        device.compute_capability = capability
    mesh: Any = SimpleNamespace(devices=np.array([[device]]))
    said: list[str] = []
    auto, xla = (EngineConfig(runner=RunnerConfig(kernels=name)) for name in ("auto", "xla"))
    made = build.with_kernels(auto, Sharding(mesh), said.append)
    assert made == (auto if kernels == "auto" else xla)
    assert len(said) == lines
    assert all("Some Chip" in line and str(capability) in line for line in said)
    assert build.with_kernels(xla, Sharding(mesh), said.append) == xla and len(said) == lines
