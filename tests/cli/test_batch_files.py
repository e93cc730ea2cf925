"""`jaxserve batch`: its files, how it ends early, and what it says at the end."""

import json
import os
import threading

import pytest

from tests.cli import fakes
from tests.cli.files import GOOD, Files, strict


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_input_without_lines(content: bytes, run, files: Files):
    files.input.write_bytes(content)
    assert run().code == 0
    assert files.output.read_bytes() == b""


def refused(ran, assembled, *words: str) -> None:
    assert ran.code == 2
    assert ran.err.startswith("jaxserve: error: ")
    assert ran.err.count("\n") == 1
    assert all(word in ran.err for word in words), ran.err
    assert assembled == []


def test_files_are_checked_before_anything_heavy(jaxserve, files: Files, assembled, tmp_path):
    missing = jaxserve("batch", tmp_path / "no.jsonl", "--output", files.output)
    refused(missing, assembled, "no.jsonl", "does not exist")
    files.write(GOOD)
    refused(jaxserve("batch", tmp_path, "--output", files.output), assembled, "no regular file")
    nowhere = tmp_path / "no" / "out.jsonl"
    refused(jaxserve("batch", files.input, "--output", nowhere), assembled, "folder")
    refused(jaxserve("batch", files.input, "--output", tmp_path), assembled, "is a folder")
    same = jaxserve("batch", files.input, "--output", files.input, "--restart")
    refused(same, assembled, "is the input file")
    link = tmp_path / "link.jsonl"
    os.link(files.input, link)
    refused(jaxserve("batch", files.input, "--output", link, "--restart"), assembled, "input file")
    assert files.input.read_bytes() == json.dumps(GOOD).encode() + b"\n"


def test_an_output_that_exists_is_kept_unless_told_otherwise(run, files: Files, assembled):
    files.write(GOOD)
    files.output.write_text("precious")
    refused(run(), assembled, "exists", "--restart")
    assert files.output.read_text() == "precious"
    assert run("--restart").code == 0
    assert len(files.read()) == 1
    assert files.output.with_name("out.jsonl.old-1").read_text() == "precious"


def test_an_interrupt_keeps_what_is_done_and_reports_it(run, files: Files, monkeypatch):
    from jaxserve.offline.output import Output

    write, count = Output.write, 0

    def interrupted(self, *result):
        nonlocal count
        count += 1
        if count == 11:
            raise KeyboardInterrupt
        write(self, *result)

    monkeypatch.setattr(Output, "write", interrupted)
    files.write(*({"prompt": f"{i}"} for i in range(500)))
    ran = run("--json")
    assert ran.code == 75
    assert len(files.read()) == 10
    assert not any(thread.name == "jaxserve-reader" for thread in threading.enumerate())


def test_an_engine_that_fails_for_good_ends_the_job(run, files: Files, assembled, monkeypatch):
    """Not every line of a long input becomes an error result."""
    calls = 0

    def dispatch(self, batch):
        nonlocal calls
        calls += 1
        raise RuntimeError("the device is gone")

    files.write(*({"prompt": f"{i}"} for i in range(2000)))
    monkeypatch.setattr(fakes.FakeRunner, "dispatch", dispatch)
    ran = run("--set", "scheduler.max_seqs=4", "--json")
    assert ran.code == 1
    assert "jaxserve: error: 3 steps in a row failed" in ran.err
    assert calls == 3
    assert strict(ran.out)["failed"] == len(files.read()) < 100


def test_one_failed_step_fails_its_requests_and_the_job_goes_on(run, files: Files, monkeypatch):
    calls, dispatch = 0, fakes.FakeRunner.dispatch

    def sometimes(self, batch):
        nonlocal calls
        calls += 1
        if calls % 40 == 0:
            raise RuntimeError("a bad step")
        return dispatch(self, batch)

    files.write(*({"prompt": f"{i}", "max_tokens": 20} for i in range(200)))
    monkeypatch.setattr(fakes.FakeRunner, "dispatch", sometimes)
    assert run("--set", "scheduler.max_seqs=4").code == 1
    results = files.read()
    failed = [result for result in results if result["error"] is not None]
    assert len(results) == 200
    assert 0 < len(failed) < 100
    assert all(result["error"]["status_code"] == 500 for result in failed)


@pytest.mark.parametrize("caching", ["true", "false"])
def test_samples_that_end_in_one_step_give_one_result(caching: str, run, files: Files):
    files.write({"prompt": "x", "n": 4, "max_tokens": 3, "ignore_eos": True})
    assert run("--set", f"cache.prefix_caching={caching}").code == 0
    assert [len(r["response"]["body"]["choices"]) for r in files.read()] == [4]


def test_a_disk_that_is_full_is_one_line_and_exit_75(run, files: Files, monkeypatch):
    from jaxserve.offline.output import Output

    def full(self, *result):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Output, "write", full)
    files.write(GOOD)
    ran = run()
    assert ran.code == 75
    assert ran.err.splitlines()[0].startswith("jaxserve: error: ")
    assert "No space left" in ran.err


def test_the_summary_goes_to_stderr_without_json(run, files: Files):
    files.write(GOOD, b"{")
    ran = run()
    assert ran.out == ""
    assert "1 done, 1 failed of 2 lines" in ran.err
