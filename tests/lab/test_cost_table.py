"""A cost table comes back from its file as it was, and no other file is taken for one."""

import json
from pathlib import Path

import pytest

from jaxserve.costs import CostModel
from jaxserve.lab import cost_table
from jaxserve.lab.cost_table import CostTable, CostTableError

COSTS = CostModel(
    (8, 64), (0.006, 0.017), rows=(8,), sampling={"greedy": (0.002,)}, chunk_pair=1e-9, host=1e-3
)
TABLE = CostTable(source="by hand", device="cpu", model="m", costs=COSTS, facts={"error": 0.03})


def test_a_table_comes_back_as_it_was(tmp_path: Path):
    path = tmp_path / "made" / "table.json"
    cost_table.save(path, TABLE)
    assert cost_table.load(path) == TABLE
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_a_table_written_by_hand_needs_only_what_is_known(tmp_path: Path):
    path = tmp_path / "chip.json"
    costs = {"tokens": [128, 256], "program": [0.01, 0.02]}
    path.write_text(json.dumps({"jaxserve_costs": 2, "source": "a paper", "device": "A100"}))
    with pytest.raises(CostTableError, match="model"):
        cost_table.load(path)
    whole = {
        "jaxserve_costs": 2,
        "source": "a paper",
        "device": "A100",
        "model": "Yi",
        "costs": costs,
    }
    path.write_text(json.dumps(whole))
    assert cost_table.load(path).costs == CostModel((128, 256), (0.01, 0.02))


@pytest.mark.parametrize(
    "change",
    [
        {"jaxserve_costs": 1},
        {"device": 7},
        {"costs": {"tokens": [64, 8], "program": [1.0, 2.0]}},
        {"costs": {"tokens": [8], "program": [-1.0]}},
        {"cost": {}},
    ],
)
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, change: dict):
    path = tmp_path / "table.json"
    cost_table.save(path, TABLE)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CostTableError, match="table.json"):
        cost_table.load(path)


def test_a_missing_file_and_a_torn_one_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "table.json"
    with pytest.raises(CostTableError, match="table.json"):
        cost_table.load(path)
    cost_table.save(path, TABLE)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CostTableError, match="table.json"):
        cost_table.load(path)


def test_a_file_name_changes_with_any_fact_and_not_with_their_order():
    facts = {"model": "m", "device": "cpu", "tokens": (8, 16)}
    name = cost_table.file_name(facts)
    assert name == cost_table.file_name(dict(reversed(facts.items())))
    for key, other in {"model": "n", "device": "tpu", "tokens": (8,)}.items():
        assert cost_table.file_name(facts | {key: other}) != name
