"""`jaxserve batch` run again: after an interruption, after changes, beside another process."""

import dataclasses
import errno
import gzip
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.offline.codecs import codec_of
from jaxserve.offline.lock import LocalLock
from jaxserve.offline.output import Output
from jaxserve.offline.storage import Os
from model_zoo.weights.manifest import Manifest, write_manifest
from tests.cli import fakes
from tests.cli.files import GOOD, Files, strict

SEEDED = [
    {"custom_id": f"id-{i}", "prompt": f"p{i}", "temperature": 0.9, "seed": i, "max_tokens": 12}
    for i in range(60)
]


def texts(results: list[dict[str, Any]]) -> dict[str, str]:
    found = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results}
    assert len(found) == len(results)
    return found


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of every file; the lock has no content of its own."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The process ends at this result, with nothing tidied up."""
    write, written = Output.write, 0

    def dies(self: Output, *result: Any) -> None:
        nonlocal written
        written += 1
        if written > count:
            monkeypatch.undo_to_write()  # type: ignore[attr-defined]
            self._broken = True
            raise KeyboardInterrupt
        write(self, *result)

    monkeypatch.undo_to_write = lambda: setattr(Output, "write", write)  # type: ignore[attr-defined]
    Output.write = dies  # type: ignore[method-assign]


@pytest.fixture
def undisturbed(run, files: Files) -> dict[str, str]:
    """What the job gives when nothing happens to it."""
    files.write(*SEEDED)
    assert run().code == 0
    found = texts(files.read())
    assert run("--restart").code == 0
    for path in (*files.output.parent.glob("out.jsonl*"),):
        if path.is_file():
            path.unlink()
    for path in (files.output.parent / "out.jsonl.journal").iterdir():
        path.unlink()
    return found


def test_b80_a_finished_job_that_is_run_again_does_nothing(run, files: Files, assembled):
    files.write(*SEEDED)
    assert run().code == 0
    before = snapshot(files.output.parent)
    ran = run("--json")
    assert ran.code == 0
    assert strict(ran.out)["done"] == strict(ran.out)["done_before"] == 60
    assert len(assembled) == 1
    assert snapshot(files.output.parent) == before


@pytest.mark.parametrize("count", [0, 1, 17, 59])
def test_b80_an_interrupted_job_goes_on_and_says_the_same(
    count: int, run, files: Files, monkeypatch, undisturbed
):
    interrupt_after(monkeypatch, count)
    assert run().code == 75
    done = files.output.read_bytes()
    ran = run("--json")
    assert ran.code == 0
    assert files.output.read_bytes().startswith(done)
    assert texts(files.read()) == undisturbed
    report = strict(ran.out)
    before = len(done.splitlines())
    assert (report["done"], report["done_before"]) == (60, before)
    told = f"going on: {before} of 60 lines have results, {60 - before} are to be run\n"
    assert (told in ran.err) == (before > 0)


CHANGES = [
    (["--temperature", "0.5"], ["--temperature was 1.0 and is 0.5"]),
    (["--max-tokens", "7", "--seed", "3"], ["--max-tokens was 128 and is 7", "--seed was not set"]),
    (["--token-ids"], ["--token-ids was false and is true"]),
    (["--set", "model.dtype=float32"], ['model.dtype was "auto" and is "float32"']),
    (["--set", "sampling.seed=4"], ["sampling.seed was 0 and is 4"]),
    (["--set", "cache.dtype=float32"], ['cache.dtype was "auto" and is "float32"']),
]


@pytest.mark.parametrize(("options", "words"), CHANGES)
def test_other_settings_are_refused_by_name_and_nothing_is_touched(
    options: list[str], words: list[str], run, files: Files, assembled
):
    files.write(*SEEDED[:5])
    assert run().code == 0
    before = snapshot(files.output.parent)
    ran = run(*options)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert all(word in ran.err for word in (*words, "--accept-changes", "--restart")), ran.err
    assert snapshot(files.output.parent) == before
    assert len(assembled) == 1
    assert run(*options, "--accept-changes").code == 0
    assert run(*options).code == 0, "what was accepted is what the job is now"


def test_a_data_type_that_is_another_on_this_machine_is_refused_by_name(
    run, files: Files, monkeypatch: pytest.MonkeyPatch
):
    """`auto` is float32 on one kind of CPU and bfloat16 on another."""

    def machine(dtype: str) -> None:
        def resolve(config: EngineConfig, *rest: Any) -> EngineConfig:
            config = config_resolve(config, *rest)
            return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))

        monkeypatch.setattr(fakes, "resolve", resolve)

    config_resolve = fakes.resolve
    files.write(*SEEDED[:20])
    machine("float32")
    interrupt_after(monkeypatch, 9)
    run()
    before = snapshot(files.output.parent)
    assert before
    machine("bfloat16")
    ran = run()
    assert ran.code == 2 and 'model.dtype was "float32" and is "bfloat16"' in ran.err
    assert snapshot(files.output.parent) == before
    machine("float32")
    assert run("--set", "model.dtype=float32").code == 0, "named, not changed"
    assert run().code == 0
    files.write(*SEEDED[:25])
    machine("bfloat16")
    assert run("--accept-changes").code == 0
    files.write(*SEEDED[:30])
    ran = run("--set", "model.dtype=float32")
    assert ran.code == 2 and 'model.dtype was "bfloat16" and is "float32"' in ran.err


def test_what_only_a_promise_of_bits_makes_count_is_not_named_when_the_promise_changed(
    run, files: Files
):
    files.write(*SEEDED[:5])
    assert run("--set", "runner.deterministic=true").code == 0
    ran = run()
    assert ran.code == 2 and "begun with: runner.deterministic was true and is false." in ran.err
    ran = run("--set", "runner.deterministic=true", "--set", "scheduler.max_seqs=9")
    assert ran.code == 2 and "scheduler.max_seqs was" in ran.err


def test_settings_that_do_not_change_results_are_no_change(run, files: Files):
    files.write(*SEEDED[:5])
    assert run().code == 0
    assert run("--set", "scheduler.max_seqs=3", "--sync-interval", 1, "--grace", 1).code == 0


def test_another_model_is_refused(run, files: Files, monkeypatch, tmp_path):
    files.write(*SEEDED[:5])
    assert run().code == 0
    other = tmp_path / "other.gguf"
    other.write_bytes(b"other weights")
    monkeypatch.setattr("jaxserve.sources.resolve", lambda name, **_: other)
    ran = run()
    assert ran.code == 2 and "weights was" in ran.err


@pytest.fixture(params=["safetensors", "orbax"])
def model(request, monkeypatch, tmp_path: Path) -> Path:
    """A folder that looks like a model; nothing reads what is in it."""
    folder = tmp_path / "a model"
    weights = {"safetensors": "model.safetensors", "orbax": "weights/d/0"}[request.param]
    for name in ("config.json", "tokenizer.json", weights):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"{}")
    if request.param == "orbax":
        write_manifest(folder, Manifest())
    monkeypatch.setattr("jaxserve.sources.resolve", lambda name, **_: folder)
    return folder


def test_what_a_job_writes_into_the_folder_of_its_model_is_no_part_of_it(
    jaxserve, model: Path, monkeypatch
):
    files = Files(model)
    files.write(*SEEDED[:9])
    command = ("batch", files.input, "--output", files.output)
    interrupt_after(monkeypatch, 4)
    assert jaxserve(*command).code == 75
    ran = jaxserve(*command)
    assert ran.code == 0, ran.err
    assert len(texts(files.read())) == 9
    (model / "README.txt").write_text("a note")
    assert jaxserve(*command).code == 0
    for path in sorted(set(model.rglob("*")) - set(model.glob("*.jsonl*"))):
        if path.is_file() and ".journal" not in str(path) and path.suffix != ".txt":
            before = path.read_bytes()
            path.write_bytes(before + b" ")
            ran = jaxserve(*command)
            assert ran.code == 2 and " was " in ran.err, path
            path.write_bytes(before)


@pytest.mark.parametrize("more", [(), ("--restart",)])
def test_an_output_among_the_files_of_the_model_is_refused(
    jaxserve, files: Files, model: Path, monkeypatch, more
):
    files.write(*SEEDED[:3])
    link = model.with_name("link")
    link.symlink_to(model)
    alone = model.with_name("alone.gguf")
    alone.write_bytes(b"weights")
    before = snapshot(model.parent)

    def refused(output: Path) -> None:
        ran = jaxserve("batch", files.input, "--output", output, *more)
        assert ran.code == 2 and "that the model" in ran.err and ran.err.count("\n") == 1
        assert snapshot(model.parent) == before

    for name in ("tokenizer.json", "chat_template.json", "more.safetensors"):
        refused(model / name)
        refused(link / name)
    if (model / "weights").exists():
        refused(model / "weights" / "out.jsonl")
    monkeypatch.setattr("jaxserve.sources.resolve", lambda name, **_: alone)
    refused(alone)


def test_a_changed_input_is_refused_and_can_be_accepted(run, files: Files):
    files.write(*SEEDED[:5])
    assert run().code == 0
    first = texts(files.read())
    files.write(*reversed(SEEDED[2:9]))
    before = snapshot(files.output.parent)
    ran = run()
    assert ran.code == 2 and "input was" in ran.err and "lines was 5 and is 7" in ran.err
    assert snapshot(files.output.parent) == before
    ran = run("--accept-changes")
    assert ran.code == 0 and "2 results are of lines that the input has no more" in ran.err
    after = texts(files.read())
    assert len(after) == 9 and first.items() <= after.items()


def test_lines_without_an_id_are_known_by_content_and_ordinal(run, files: Files):
    same = [{"prompt": "x", "max_tokens": 3}] * 3
    files.write(*same, GOOD)
    assert run().code == 0
    files.write(*same, GOOD, *same)
    assert run("--accept-changes").code == 0
    assert sorted(r["custom_id"] for r in files.read()) == [f"line-{i}" for i in range(1, 8)]
    files.write(GOOD, *same)
    ran = run("--accept-changes")
    assert ran.code == 2 and "custom_id" in ran.err and "line" in ran.err


def test_restart_sets_the_old_aside(run, files: Files):
    files.write(*SEEDED[:5])
    assert run().code == 0
    old = files.output.read_bytes()
    for number in (1, 2):
        ran = run("--restart", "--max-tokens", 3 + number)
        assert ran.code == 0
        assert f"out.jsonl.old-{number}" in ran.err
    assert files.output.with_name("out.jsonl.old-1").read_bytes() == old
    assert len(files.read()) == 5


def test_a_damaged_or_missing_output_is_refused_and_can_be_mended(
    run, files: Files, monkeypatch, undisturbed
):
    assert run().code == 0
    good = files.output.read_bytes()
    files.output.write_bytes(good.replace(b"id-30", b"id-XX"))
    before = snapshot(files.output.parent)
    ran = run()
    assert ran.code == 2 and "changed or damaged: from byte" in ran.err
    assert snapshot(files.output.parent) == before
    assert run("--accept-changes").code == 0
    assert texts(files.read()) == undisturbed
    files.output.unlink()
    ran = run()
    assert ran.code == 2 and "is gone" in ran.err
    assert not files.output.exists()
    assert run("--accept-changes").code == 0
    assert texts(files.read()) == undisturbed


def test_retry_errors_redoes_what_failed_for_a_passing_reason(run, files: Files, monkeypatch):
    lines: list[Any] = [*SEEDED[:6], {"custom_id": "bad", "prompt": 5}]
    files.write(*lines)
    dispatch = fakes.FakeRunner.dispatch
    calls = 0

    def fails_once(self: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a bad step")
        return dispatch(self, batch)

    monkeypatch.setattr(fakes.FakeRunner, "dispatch", fails_once)
    assert run().code == 1
    failed = [r["custom_id"] for r in files.read() if r["error"]]
    assert len(failed) > 1
    kept = [line for line in files.output.read_bytes().splitlines() if b'"error":null' in line]
    assert run().code == 1, "failed lines are results too"
    ran = run("--retry-errors", "--json")
    assert ran.code == 1
    again = 6 - len(kept)
    assert f"{1 + len(kept)} of 7 lines have results, {again} are to be run, {again} of" in ran.err
    report = strict(ran.out)
    assert (report["done"], report["failed"]) == (6, 1)
    assert [r["custom_id"] for r in files.read() if r["error"]] == ["bad"]
    assert len(files.by_id()) == len(files.read()) == 7
    assert set(kept) <= set(files.output.read_bytes().splitlines())


def test_max_errors_ends_a_job_that_is_plainly_wrong(run, files: Files):
    files.write(*(b"{" for _ in range(50)), *SEEDED)
    ran = run("--max-errors", 3)
    assert ran.code == 1 and "more than 3 lines failed" in ran.err
    assert len(files.read()) < 10
    assert run("--max-errors", 100).code == 1
    assert len(files.read()) == 110


def test_a_second_process_is_refused_and_told_who_works(run, files: Files, assembled):
    files.write(*SEEDED[:5])
    folder = f"{files.output}.journal"
    os.mkdir(folder)
    lock = LocalLock(folder)
    lock.sign()
    ran = run()
    assert ran.code == 2
    assert f"pid {os.getpid()} on " in ran.err
    assert not files.output.exists() and assembled == []
    lock.release()
    assert run().code == 0


def test_what_cannot_be_run_leaves_nothing_behind(run, files: Files, monkeypatch):
    files.write(*SEEDED[:2], SEEDED[1])
    assert run().code == 2
    files.write(GOOD)

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no such model")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["jaxserve.build"], "assemble", broken)
        assert run().code == 2
    with monkeypatch.context() as patch:
        patch.setattr("jaxserve.sources.resolve", broken)
        ran = run()
        assert ran.code == 2 and "no such model" in ran.err
    assert [path.name for path in files.output.parent.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_compressed_files_and_several_inputs(suffix: str, jaxserve, tmp_path: Path):
    from jaxserve.offline.codecs import codec_of

    codec = codec_of(suffix)
    for shard in range(3):
        rows = [json.dumps(row).encode() + b"\n" for row in SEEDED[shard * 20 : shard * 20 + 20]]
        halves = codec.encode(b"".join(rows[:9])), codec.encode(b"".join([*rows[9:], b"{\n"]))
        (tmp_path / f"part-{shard}{suffix}").write_bytes(b"".join(halves))
    output = tmp_path / f"out{suffix}"
    pattern = tmp_path / f"part-*{suffix}"
    assert jaxserve("batch", pattern, "--output", output).code == 1
    with output.open("rb") as file:  # of several blocks, when the job was flushed in between
        results = [json.loads(line) for line in codec.reader(file).read().splitlines()]
    assert len(results) == 63
    bad = [r["error"] for r in results if r["error"]]
    assert {(Path(e["file"]).name, e["line"]) for e in bad} == {
        (f"part-{shard}{suffix}", 21) for shard in range(3)
    }
    assert len({r["id"] for r in results}) == 63


@pytest.mark.parametrize("options", [(), ("--roll-size", "2K", "--sync-interval", 0)])
def test_a_pattern_that_fits_the_output_too_goes_on(
    options: tuple[Any, ...], jaxserve, files: Files, monkeypatch
):
    files.write(*SEEDED)
    command = ("batch", files.input.parent / "*", "--output", files.output, *options)
    interrupt_after(monkeypatch, 45)
    assert jaxserve(*command).code == 75
    assert len(list(files.output.parent.glob("out*.jsonl"))) >= 1
    ran = jaxserve(*command)
    assert ran.code == 0 and "60 done" in ran.err, ran.err
    assert jaxserve(*command).code == 0
    lines = [path.read_bytes() for path in files.output.parent.glob("out*.jsonl")]
    assert len(texts([json.loads(line) for line in b"".join(lines).splitlines()])) == 60
    refused = jaxserve("batch", files.input, files.output.parent / "out*", "--output", files.input)
    assert refused.code == 2 and "is the input file" in refused.err


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("frames", [1, 60])
def test_a_compressed_input_that_is_cut_off_is_refused(
    suffix: str, frames: int, jaxserve, tmp_path: Path, assembled
):
    codec = codec_of(suffix)
    rows = [json.dumps(row).encode() + b"\n" for row in SEEDED]
    size = len(rows) // frames
    blocks = [codec.encode(b"".join(rows[at : at + size])) for at in range(0, len(rows), size)]
    data, given = b"".join(blocks), tmp_path / f"in.jsonl{suffix}"
    command = ("batch", given, "--output", tmp_path / "out.jsonl")
    for cut in (1, 9, len(blocks[-1]) // 2, len(blocks[-1]) - 2):
        given.write_bytes(data[:-cut])
        ran = jaxserve(*command)
        assert ran.code == 2 and "cut off" in ran.err, (cut, ran.err)
    assert not assembled
    assert [path.name for path in tmp_path.iterdir()] == [given.name]
    given.write_bytes(data)
    assert jaxserve(*command).code == 0
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 60


class Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize("option", ["--accept-changes", "--restart"])
def test_a_refused_standard_input_leaves_the_one_before(
    option: str, jaxserve, tmp_path, monkeypatch
):
    data = b"".join(json.dumps(row).encode() + b"\n" for row in SEEDED)
    command = ("batch", "-", "--output", tmp_path / "out.jsonl")
    interrupt_after(monkeypatch, 10)
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert jaxserve(*command).code == 75
    before = snapshot(tmp_path)
    monkeypatch.setattr(sys, "stdin", Stdin(data + data.splitlines(keepends=True)[0]))
    ran = jaxserve(*command, option)
    assert ran.code == 2 and "lines 1 and 61 have the same custom_id" in ran.err
    assert snapshot(tmp_path) == before
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    ran = jaxserve(*command)
    assert ran.code == 0 and "60 done" in ran.err


def test_standard_input_is_kept_so_that_the_job_can_go_on(jaxserve, tmp_path, monkeypatch):
    data = b"".join(json.dumps(row).encode() + b"\n" for row in SEEDED)
    output = tmp_path / "out.jsonl"
    command = ("batch", "-", "--output", output)
    interrupt_after(monkeypatch, 10)
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert jaxserve(*command).code == 75
    monkeypatch.setattr(sys, "stdin", Stdin(data + b"{}\n"))
    assert jaxserve(*command).code == 2
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    assert jaxserve(*command).code == 0
    assert len(texts([json.loads(line) for line in output.read_bytes().splitlines()])) == 60
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert jaxserve(*command).code == 0
    monkeypatch.setattr(sys, "stdin", Stdin(data.splitlines(keepends=True)[0]))
    assert jaxserve(*command, "--restart").code == 0
    assert len(output.read_bytes().splitlines()) == 1


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, 75, "No space left on device; what is done is kept, run it again"),
        (errno.EDQUOT, 75, "run it again to go on"),
        (errno.EACCES, 2, "Permission denied"),
    ],
)
def test_standard_input_that_cannot_be_kept(  # noqa: PLR0913
    number: int, code: int, words: str, begun: bool, jaxserve, tmp_path, monkeypatch
):
    """Full: the same command later.  Nothing of it is left on the disk."""
    data = b"".join(json.dumps(row).encode() + b"\n" for row in SEEDED)
    command = ("batch", "-", "--output", tmp_path / "out.jsonl")
    if begun:
        interrupt_after(monkeypatch, 10)
        monkeypatch.setattr(sys, "stdin", Stdin(data))
        assert jaxserve(*command).code == 75
    before = snapshot(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(sys, "stdin", Stdin(data))
        full.setattr(Os, "pwrite", staticmethod(refuses(number)))
        ran = jaxserve(*command)
    assert ran.code == code and words in ran.err and ran.err.count("\n") == 1
    assert snapshot(tmp_path) == before
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert jaxserve(*command).code == 0


def refuses(number: int) -> Any:
    def call(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_a_full_disk_where_nothing_is_left_to_run(run, files: Files, monkeypatch):
    files.write(GOOD)
    assert run().code == 0
    with monkeypatch.context() as full:
        full.setattr(Os, "pwrite", staticmethod(refuses(errno.ENOSPC)))
        ran = run("--temperature", 0, "--accept-changes")
    assert ran.code == 75 and "run it again to go on" in ran.err
    assert run("--temperature", 0, "--accept-changes").code == 0


def test_parts_of_a_size(run, files: Files, monkeypatch, undisturbed):
    interrupt_after(monkeypatch, 25)
    options = ("--roll-size", "2K", "--sync-interval", 0, "--set", "scheduler.max_seqs=2")
    assert run(*options).code == 75
    assert run(*options).code == 0
    parts = sorted(files.output.parent.glob("out-*.jsonl"))
    assert len(parts) > 5 and parts[0].name == "out-00001.jsonl"
    assert all(2048 <= part.stat().st_size < 4096 for part in parts[:-1])
    lines = b"".join(part.read_bytes() for part in parts).splitlines()
    assert texts([json.loads(line) for line in lines]) == undisturbed
    ran = run()
    assert ran.code == 2 and "was begun with --roll-size; give it again" in ran.err


def test_openai_example_lines_run_unchanged(run, files: Files):
    """The input of OpenAI's batch guide, byte for byte."""
    files.input.write_bytes(
        b'{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": '
        b'{"model": "gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are a '
        b'helpful assistant."},{"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}\n'
        b'{"custom_id": "request-2", "method": "POST", "url": "/v1/chat/completions", "body": '
        b'{"model": "gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are an '
        b'unhelpful assistant."},{"role": "user", "content": "Hello world!"}],"max_tokens": '
        b"1000}}\n"
    )
    assert run("--any-model").code == 0
    results = files.by_id()
    assert set(results) == {"request-1", "request-2"}
    for result in results.values():
        assert result["response"]["body"]["choices"][0]["message"]["role"] == "assistant"


def test_gzip_output_is_one_file_for_any_reader(jaxserve, files: Files, tmp_path: Path):
    files.write(*SEEDED)
    output = tmp_path / "o.jsonl.gz"
    assert jaxserve("batch", files.input, "--output", output, "--sync-interval", 0).code == 0
    with gzip.open(output, "rt") as file:
        assert len(texts([json.loads(line) for line in file])) == 60
