"""Shards and their merge: every line once, in the order of the input, or nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.offline import shard
from jaxserve.offline.shard import Shard
from tests.cli.files import Files, strict

COUNT = 3
LINES: list[Any] = [
    b"{" if i == 11 else {"custom_id": f"id-{i}", "prompt": f"{i} " * (i % 5), "max_tokens": 3}
    for i in range(20)
]


@given(lines=st.integers(0, 50), count=st.integers(1, 9))
def test_shards_are_a_partition_that_depends_on_ordinals_only(lines: int, count: int):
    masks = [shard.mask(Shard(i, count), lines) for i in range(count)]
    assert (sum(mask.astype(int) for mask in masks) == 1).all()
    sizes = [int(mask.sum()) for mask in masks]
    assert max(sizes) - min(sizes) <= 1
    assert (shard.mask(Shard(0, count), lines + 3)[:lines] == masks[0]).all()
    assert shard.mask(None, lines).all()


@pytest.mark.parametrize("text", ["", "1", "3/3", "-1/3", "1/0", "a/b", "1/2/3", " 1/2", "٠/2"])
def test_what_is_no_shard(text: str, run, files: Files):
    files.write({"prompt": "x"})
    ran = run(f"--shard={text}")
    assert ran.code == 2 and "is not I/N" in ran.err


class Shards:
    def __init__(self, jaxserve, files: Files) -> None:
        self.jaxserve, self.files = jaxserve, files
        self.outputs = [files.output.with_name(f"part-{i}.jsonl") for i in range(COUNT)]
        self.merged = files.output

    def run(self) -> list[Any]:
        self.files.write(*LINES)
        return [
            self.jaxserve(
                *("batch", self.files.input, "--output", output, "--shard", f"{i}/{COUNT}"),
                *("--json", "--temperature", 0),
            )
            for i, output in enumerate(self.outputs)
        ]

    def merge(self, *more: object, outputs: list[Path] | None = None) -> Any:
        given = self.outputs if outputs is None else outputs
        return self.jaxserve(
            "batch", "merge", self.files.input, *given, "--output", self.merged, *more
        )


@pytest.fixture
def shards(jaxserve, files: Files) -> Shards:
    return Shards(jaxserve, files)


def stable(result: dict[str, Any]) -> dict[str, Any]:
    """Without what depends on the time, or on what the prefix cache held."""
    if result["response"] is not None:
        result["response"]["body"].pop("created")
        result["response"]["body"]["usage"].pop("prompt_tokens_details")
    return result


def test_shards_give_what_one_job_gives(shards: Shards, run, files: Files):
    ran = shards.run()
    reports = [strict(one.out) for one in ran]
    assert [report["lines"] for report in reports] == [7, 7, 6]
    assert [one.code for one in ran] == [0, 1, 1] or [one.code for one in ran].count(1) >= 1
    merged = shards.merge("--json")
    assert merged.code == 1  # line 12 is no JSON, prompt 0 has no tokens
    report = strict(merged.out)
    assert report["complete"] and report["missing"] == report["doubled"] == report["foreign"] == []
    assert [12, None] in report["failed"]
    together = [stable(result) for result in files.read()]
    assert [result["id"] for result in together] == [f"batch_req_{i + 1}" for i in range(20)]
    assert shards.merged.unlink() is None
    assert run("--temperature", 0).code == 1
    alone = sorted(map(stable, files.read()), key=lambda result: int(result["id"][10:]))
    assert together == alone
    assert "12" in merged.err and "lines failed" in merged.err


def test_several_inputs_in_the_order_of_the_job(jaxserve, tmp_path: Path):
    inputs = [tmp_path / name for name in ("m.jsonl", "z.jsonl", "a.jsonl")]
    for place, path in enumerate(inputs):
        rows = [{"custom_id": f"{place}-{i}", "prompt": "x", "max_tokens": 2} for i in range(4)]
        path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    outputs = [tmp_path / f"part-{i}.jsonl" for i in range(2)]
    for i, output in enumerate(outputs):
        assert jaxserve("batch", *inputs, "--output", output, "--shard", f"{i}/2").code == 0
    merged = tmp_path / "all.jsonl"

    def merge(first: Path, *more: Path) -> Any:
        options = [word for path in more for word in ("--more-input", path)]
        return jaxserve("batch", "merge", first, *outputs, *options, "--output", merged)

    for wrong in (inputs[:1], inputs[:2]):
        ran = merge(*wrong)
        assert ran.code == 2 and "results belong to no line of this input" in ran.err
    assert merge(*inputs).code == 0
    results = [json.loads(line) for line in merged.read_bytes().splitlines()]
    numbers = [place * 5 + i + 2 for place in range(3) for i in range(4)]  # a blank line counts
    assert [result["id"] for result in results] == [f"batch_req_{n}" for n in numbers]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_shards_are_merged_to_the_same(suffix: str, shards: Shards, files: Files):
    shards.run()
    assert shards.merge().code == 1
    plain = [stable(result) for result in files.read()]
    shards.outputs = [path.with_name(path.name + suffix) for path in shards.outputs]
    shards.run()
    assert shards.outputs[0].read_bytes()[:1] in (b"\x1f", b"\x28")
    assert shards.merge("--overwrite").code == 1
    assert [stable(result) for result in files.read()] == plain
    names = {path.name for path in files.output.parent.iterdir() if path.is_file()}
    assert not any("merging" in name for name in names)
    shards.merged.unlink()
    whole = shards.outputs[1].read_bytes()
    shards.outputs[1].write_bytes(whole[:-9])
    ran = shards.merge()
    assert ran.code == 1 and "damaged or cut off" in ran.err, ran.err
    assert not shards.merged.exists()


def test_a_line_that_is_missing(shards: Shards):
    shards.run()
    lines = shards.outputs[1].read_bytes().splitlines(keepends=True)
    lost = json.loads(lines[2])["id"].removeprefix("batch_req_")
    shards.outputs[1].write_bytes(b"".join(lines[:2] + lines[3:]))
    ran = shards.merge()
    assert ran.code == 75
    assert f"1 lines have no result: {lost} (" in ran.err
    assert not shards.merged.exists()


def test_a_torn_last_line_is_not_there(shards: Shards):
    shards.run()
    shards.outputs[2].write_bytes(shards.outputs[2].read_bytes()[:-1])
    ran = shards.merge()
    assert ran.code == 75 and "1 lines have no result" in ran.err
    assert not shards.merged.exists()


def test_a_shard_that_is_left_out(shards: Shards):
    shards.run()
    ran = shards.merge("--json", outputs=shards.outputs[:2])
    assert ran.code == 75
    assert len(strict(ran.out)["missing"]) == 6


def test_a_line_that_is_doubled(shards: Shards):
    shards.run()
    first = shards.outputs[0].read_bytes().splitlines(keepends=True)[0]
    with shards.outputs[2].open("ab") as file:
        file.write(first)
    ran = shards.merge()
    assert ran.code == 2 and "1 lines have more than one result: " in ran.err
    assert not shards.merged.exists()


@pytest.mark.parametrize(
    "foreign",
    [
        b'{"id": "batch_req_21", "custom_id": "id-20", "error": null}\n',
        b'{"id": "batch_req_0", "custom_id": "id-0", "error": null}\n',
        b'{"id": "batch_req_x", "error": null}\n',
        b"{\n",
        b"[]\n",
    ],
)
def test_a_result_of_another_input(foreign: bytes, shards: Shards):
    shards.run()
    with shards.outputs[1].open("ab") as file:
        file.write(foreign)
    ran = shards.merge()
    assert ran.code == 2 and "1 results belong to no line of this input: " in ran.err
    assert str(shards.outputs[1]) in ran.err
    assert not shards.merged.exists()


def test_an_input_that_was_changed(shards: Shards):
    shards.run()
    LATER = [{**line, "custom_id": "other"} if i == 4 else line for i, line in enumerate(LINES)]
    shards.files.write(*LATER)
    ran = shards.merge()
    assert ran.code == 2 and "result of line 5" in ran.err


def test_an_output_that_exists_is_kept(shards: Shards):
    shards.run()
    shards.merged.write_text("precious")
    assert shards.merge().code == 2
    assert shards.merged.read_text() == "precious"
    ran = shards.merge("--overwrite", outputs=[*shards.outputs, shards.merged])
    assert ran.code == 2 and "is the input file" in ran.err
    assert shards.merge("--overwrite", outputs=shards.outputs[1:]).code == 75
    assert shards.merged.read_text() == "precious"
    assert shards.merge("--overwrite").code == 1
    assert len(shards.files.read()) == 20
    left = {path.name for path in shards.merged.parent.iterdir() if "merging" in path.name}
    assert left == set()


def test_a_shard_that_does_not_exist(shards: Shards, tmp_path: Path):
    shards.run()
    ran = shards.merge(outputs=[tmp_path / "no.jsonl"])
    assert ran.code == 2 and "no.jsonl does not exist" in ran.err
