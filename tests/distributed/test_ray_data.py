"""The documented example of Ray Data, for real."""

from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.offline.ray_data import Generate
from jaxserve.request import SamplingParams
from tests.cli import fakes


def fake(column: str = "prompt", **sampling: object) -> Generate:
    generate = Generate.__new__(Generate)
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    generate._start(fakes.assemble(EngineConfig()), column, params)
    return generate


def test_rows_keep_their_place_and_a_bad_one_hurts_nobody():
    prompts = ["hello", "x" * 300, "", "hello", "world, " * 9]
    out = fake(temperature=0.0, max_tokens=9)({"prompt": prompts, "id": list(range(5))})
    assert out["id"] == list(range(5))
    assert [bool(error) for error in out["error"]] == [False, True, True, False, False]
    assert "300 tokens" in out["error"][1] and not out["error"][1].startswith("line")
    assert out["text"][0] == out["text"][3] != out["text"][4]
    assert list(out["finish_reason"][1:3]) == ["error", "error"]
    assert out["output_tokens"][0] > 0 == out["output_tokens"][1]


def test_token_ids_and_messages_are_prompts_too():
    generate = fake("what", temperature=0.0, max_tokens=9)
    ids = fakes.byte_tokenizer().encode("hello")
    talk = [{"role": "user", "content": "hello", "name": None}]
    out = generate({"what": [ids, "hello", talk]})
    assert list(out["error"]) == ["", "", ""]
    assert out["text"][0] == out["text"][1] != out["text"][2]


def test_rows_without_a_seed_differ_and_rows_with_one_do_not():
    free = fake(max_tokens=20, ignore_eos=True)
    assert len({free({"prompt": ["hello"]})["text"][0] for _ in range(4)}) > 1
    seeded = fake(max_tokens=20, ignore_eos=True, seed=5)
    assert len({seeded({"prompt": ["hello"]})["text"][0] for _ in range(4)}) == 1


def test_an_empty_batch():
    assert len(fake()({"prompt": []})["text"]) == 0


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`use_[a-z0-9_]+` is deprecated:DeprecationWarning"
)  # of its own
def test_ray_data_maps_batches_with_two_actors(
    cluster: str, tiny_model: Path, engine_options: list[str], tmp_path: Path
):
    ray = pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    toml = tmp_path / "engine.toml"
    toml.write_text(_toml(engine_options))
    rows = [{"row": i, "ids": [3 + (i + j) % 50 for j in range(1 + i % 9)]} for i in range(24)]
    rows[7]["ids"] = [10_000]
    ds = ray.data.from_items(rows).map_batches(
        Generate,
        fn_constructor_kwargs={
            "model": str(tiny_model),
            "column": "ids",
            "config": str(toml),
            "sampling": {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True},
        },
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    found = sorted(ds.take_all(), key=lambda row: row["row"])
    assert [row["row"] for row in found] == list(range(24))
    assert [row["output_tokens"] for row in found] == [0 if i == 7 else 6 for i in range(24)]
    assert [bool(row["error"]) for row in found] == [i == 7 for i in range(24)]
    assert len({row["text"] for row in found if row["row"] != 7}) > 12  # 23 different prompts


def _toml(options: list[str]) -> str:
    from jaxserve import settings

    return settings.dump(settings.read(None, [option for option in options if "=" in option]))
