"""Costs that were measured before: found by what times depend on, and nothing else."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import build
from jaxserve.config import CacheConfig, EngineConfig, ModelConfig, SamplingConfig, SchedulerConfig
from jaxserve.costs import GROUPS, SPAN, TILES, CostModel, tile_pairs
from jaxserve.lab import cost_table
from jaxserve.lab.cost_table import CostTable
from pallas_kernels.ragged_paged_attention import xla
from pallas_kernels.ragged_paged_attention.plan import Rows, chunk_tiles
from tests.reference import tiny

COSTS = CostModel((8, 16), (0.01, 0.02))
CONFIG = EngineConfig(
    model=ModelConfig(name="m", dtype="float32"), scheduler=SchedulerConfig(token_budget=64)
)


def facts(config: EngineConfig = CONFIG, **model: Any) -> dict[str, Any]:
    hf = tiny.CONFIGS["mha"] | {"head_dim": 16} | model
    return build.cost_facts(build.plan(config, hf))


def test_another_model_dtype_or_set_of_programs_has_other_costs():
    known = cost_table.file_name(facts())
    assert cost_table.file_name(facts()) == known
    renamed = dataclasses.replace(CONFIG.model, name="elsewhere/m")
    assert cost_table.file_name(facts(dataclasses.replace(CONFIG, model=renamed))) == known
    for config in (
        dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, dtype="bfloat16")),
        dataclasses.replace(CONFIG, cache=CacheConfig(dtype="bfloat16")),
        dataclasses.replace(CONFIG, scheduler=SchedulerConfig(token_budget=128)),
        dataclasses.replace(CONFIG, scheduler=SchedulerConfig(token_budget=64, max_seqs=4)),
        dataclasses.replace(CONFIG, sampling=SamplingConfig(penalties=False)),
    ):
        assert cost_table.file_name(facts(config)) != known
    assert cost_table.file_name(facts(intermediate_size=120)) != known
    modes = dataclasses.replace(CONFIG, scheduler=SchedulerConfig(token_budget=64, mode="time"))
    assert cost_table.file_name(facts(modes)) == known


def test_other_code_has_other_costs(monkeypatch: pytest.MonkeyPatch):
    known = cost_table.file_name(facts())
    monkeypatch.setattr(build.program_store, "sources", lambda: ["of another version"])
    assert cost_table.file_name(facts()) != known


def test_stored_costs_are_taken_and_a_broken_file_is_not(tmp_path: Path):
    lines: list[str] = []
    path = tmp_path / "t.json"
    assert build.stored_costs(None, lines.append) is None
    assert build.stored_costs(path, lines.append) is None and not lines
    cost_table.save(path, CostTable(source="a test", device="d", model="m", costs=COSTS))
    assert build.stored_costs(path, lines.append) == COSTS
    assert str(path) in lines[0] and "a test" in lines[0]
    path.write_text("{}")
    assert build.stored_costs(path, lines.append) is None
    assert lines[1].startswith("warning:") and str(path) in lines[1]


def test_pieces_are_those_of_attention_in_xla():
    assert (GROUPS, SPAN, TILES) == (xla.DECODE_ROWS, xla.DECODE_SPAN, xla.CHUNK_TILES)


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 191, 192, 255, 256, 257, 448, 512, 700])
@pytest.mark.parametrize("start", [0, 100, 1000])
@pytest.mark.parametrize("window", [None, 1, 300, 512])
def test_pairs_are_those_of_the_tiles_that_run(tokens: int, start: int, window: int | None):
    rows = Rows(
        jnp.zeros((1, 1), jnp.int32),
        jnp.array([0, tokens]),
        jnp.array([start + tokens]),
        jnp.array(0),
    )
    counts = chunk_tiles(rows, tuple(size for size, _ in TILES))
    total, at = 0, start
    for (size, span), count in zip(TILES, counts, strict=True):
        for _ in range(int(np.asarray(count)[0])):
            low = 0 if window is None else max(0, at + 1 - window) // span
            at += size
            total += size * span * (-(-min(at, start + tokens) // span) - low)
    assert tile_pairs(start, tokens, window) == total
