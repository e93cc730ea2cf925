"""`jaxserve batch`: every line gets one result, and no line can hurt another."""

import json
import math
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from jaxserve.llm import LLM
from jaxserve.offline import inputs, jsonl, reader
from jaxserve.offline.lookahead import LookAhead
from jaxserve.offline.parse import Failed, Parser
from jaxserve.openai_api.bodies import short_name
from jaxserve.openai_api.errors import RequestError
from jaxserve.request import SamplingParams
from tests.cli import fakes
from tests.cli.files import GOOD, Files, strict


def test_a_batch_file_gives_what_python_gives(run, files: Files):
    prompts = [f"prompt {i} " * (i % 7 + 1) for i in range(300)]
    files.write(
        *(
            {"custom_id": f"id-{i}", "prompt": p, "temperature": 0.8, "seed": i, "max_tokens": 20}
            for i, p in enumerate(prompts)
        )
    )
    ran = run("--token-ids", "--json")
    assert ran.code == 0, ran.err
    samplings = [SamplingParams(temperature=0.8, seed=i, max_tokens=20) for i in range(300)]
    expected = LLM.from_assembly(fakes.assemble(EngineConfig())).generate(prompts, samplings)
    results = files.by_id()
    assert len(files.read()) == len(results) == 300
    for i, completion in enumerate(expected):
        body = results[f"id-{i}"]["response"]["body"]
        (choice,), sample = body["choices"], completion.outputs[0]
        assert choice["text"] == sample.text
        assert tuple(choice["token_ids"]) == sample.token_ids
        assert choice["finish_reason"] == sample.finish_reason
        usage = completion.usage
        assert body["usage"]["prompt_tokens"] == usage.prompt_tokens
        assert body["usage"]["completion_tokens"] == usage.completion_tokens
        assert body["usage"]["total_tokens"] == usage.total_tokens
    report = strict(ran.out)
    assert (report["done"], report["failed"], report["lines"]) == (300, 0, 300)
    assert report["output_tokens"] == sum(c.usage.completion_tokens for c in expected)
    reasons = Counter(c.outputs[0].finish_reason for c in expected)
    assert report["finish_reasons"] == reasons


def test_every_form_of_a_line(run, files: Files):
    messages = [{"role": "user", "content": "hello"}]
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
    files.write(
        {"custom_id": "plain", "prompt": "hello", **common},
        {"prompt_token_ids": fakes.byte_tokenizer().encode("hello"), **common},
        {
            "custom_id": "openai",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "SmolLM2-135M-Instruct", "prompt": "hello", **common},
        },
        {"custom_id": "chat", "messages": messages, **common},
        {
            "custom_id": "openai chat",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": messages, **common},
        },
    )
    assert run().code == 0
    results = files.by_id()
    bodies = {name: result["response"]["body"] for name, result in results.items()}
    ids = {name: tuple(body["choices"][0]["token_ids"]) for name, body in bodies.items()}
    assert ids["plain"] == ids["line-2"] == ids["openai"]
    assert ids["chat"] == ids["openai chat"] != ids["plain"]
    assert bodies["chat"]["object"] == "chat.completion"
    assert bodies["chat"]["choices"][0]["message"]["role"] == "assistant"
    assert bodies["plain"]["object"] == "text_completion"
    for result in results.values():
        assert set(result) == {"id", "custom_id", "response", "error"}
        assert result["response"]["status_code"] == 200
        assert result["error"] is None
    assert len({result["id"] for result in results.values()}) == 5


BAD: list[tuple[Any, str, str]] = [
    (b"{", "invalid_json", "invalid JSON"),
    (b"[1]", "invalid_json", "object"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN"),
    (b'{"prompt": "a", "prompt": "b"}', "invalid_json", "twice"),
    (b'{"prompt": "\\ud800"}', "invalid_json", "prompt"),
    (b'{"custom_id": "\\ud800", "prompt": "a"}', "invalid_json", "custom_id"),
    (b'{"prompt": "\xff"}', "invalid_json", "UTF-8"),
    (b"[" * 100_000 + b"]" * 100_000, "invalid_json", "nested"),
    ({"prompt": "a", "wrong": 1}, "unknown_field", "wrong"),
    ({"prompt": 5}, "invalid_request", "prompt"),
    ({"custom_id": 5, "prompt": "a"}, "invalid_request", "custom_id"),
    ({"custom_id": "u", "url": "/v1/nope", "body": {}}, "unsupported_url", "/v1/nope"),
    ({"url": "/v1/completions", "body": {"prompt": "a"}}, "invalid_request", "custom_id"),
    ({"prompt": "x" * 300}, "prompt_too_long", "300 tokens"),
    ({"prompt": "x" * 256}, "invalid_request", "256"),
    ({"prompt": ""}, "invalid_request", "no tokens"),
    ({"prompt_token_ids": []}, "invalid_request", "no tokens"),
    ({"prompt_token_ids": [99_999]}, "invalid_request", "99999"),
    ({"prompt_token_ids": [-1]}, "invalid_request", "-1"),
    ({"prompt": "a", "model": "other"}, "model_not_found", "other"),
    ({"messages": []}, "invalid_request", "messages"),
    ({"messages": [{"role": "user"}]}, "invalid_request", "content"),
    ({"prompt": "a", "logit_bias": {"70000": 1}}, "invalid_request", "70000"),
]


def test_b83_a_bad_line_is_an_error_result_and_the_others_run(run, files: Files):
    lines: list[Any] = []
    for bad, _, _ in BAD:
        lines += [bad, b"", GOOD]
    files.write(*lines)
    ran = run("--json")
    assert ran.code == 1
    report = strict(ran.out)
    assert (report["done"], report["failed"]) == (len(BAD), len(BAD))
    failed = {r["error"]["line"]: r for r in files.read() if r["error"] is not None}
    assert sorted(failed) == [3 * i + 1 for i in range(len(BAD))]
    for i, (_, code, words) in enumerate(BAD):
        result, number = failed[3 * i + 1], 3 * i + 1
        assert result["response"] is None
        assert set(result) == {"id", "custom_id", "response", "error"}
        error = result["error"]
        assert error["code"] == code, error
        assert error["message"].startswith(f"line {number}: ")
        assert words in error["message"]
        assert error["status_code"] == 400
        assert len(error["message"]) < 500


def test_b83_a_long_line_costs_no_memory_and_no_neighbour(run, files: Files, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 10_000)
    files.write(GOOD, {"prompt": "x" * 50_000}, GOOD)
    assert run().code == 1
    results = sorted(files.read(), key=lambda result: result["id"])
    assert [result["error"] is None for result in results] == [True, False, True]
    assert results[1]["error"]["code"] == "line_too_long"


def test_b79_equal_ids_are_refused_before_anything_runs(run, files: Files, assembled):
    lines: list[Any] = [{"custom_id": f"id {i}", **GOOD} for i in range(1000)]
    lines[900] = {"custom_id": "id 17", **GOOD}
    files.write(*lines)
    ran = run()
    assert ran.code == 2
    assert "lines 18 and 901" in ran.err
    assert "'id 17'" in ran.err
    assert assembled == []
    assert not files.output.exists()


def test_b79_a_made_up_id_is_not_confused_with_a_given_one(run, files: Files):
    files.write(GOOD, {"custom_id": "line-1", **GOOD})
    ran = run()
    assert ran.code == 2
    assert "lines 1 and 2" in ran.err


def test_b79_a_line_that_cannot_run_has_no_made_up_id(run, files: Files):
    files.write(b"{", {"custom_id": "line-1", **GOOD})
    assert run().code == 1
    assert [result["custom_id"] for result in files.read()] == [None, "line-1"]


@pytest.mark.parametrize(
    "broken",
    [
        b'{"custom_id": "a", "prompt": NaN}',
        b'{"custom_id": "a", "prompt": "x", "prompt": "y"}',
        b'{"custom_id": "a", "prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": 1e999, "custom_id": "a"}',
        b' {"method": "POST" , "custom_id" : "a" , "body": {"prompt": "cut o',
        b'{"custom_id": "a", "body": %s' % (b"[" * 100_000),
        b'{"custom_id": "a", "prompt": "\xff"}',
        b'{"custom_id": "a"} {"custom_id": "b"}',
    ],
)
def test_b83_a_line_that_is_no_json_keeps_the_id_that_can_be_read(broken, run, files: Files):
    files.write(broken, {"custom_id": "c", **GOOD})
    assert run().code == 1
    results = files.by_id()
    assert results.keys() == {"a", "c"}
    assert results["a"]["error"]["code"] == "invalid_json"
    before = files.output.read_bytes()
    assert run().code == 1
    assert files.output.read_bytes() == before
    files.write({"custom_id": "a", **GOOD}, broken)  # in results they could not be told apart
    ran = run("--restart")
    assert ran.code == 2 and "lines 1 and 2" in ran.err


@pytest.mark.parametrize(
    "broken",
    [
        b'{"custom_id": "a", "custom_id": "b"}', b'{"x": {"custom_id": "a"}, "y"}',
        b'{"custom_id": 3, "y"}', b'{"custom_id": "", "y"}', b'["custom_id", "a"', b"\xff{",
        b'{"custom_id": "\xff"}', b'{"custom_id": "\\ud800"}', b'{"custom_id": "aaaa', b"{3: 4}",
        b'{"custom_id": "%s", "y"}' % (b"a" * 513), b'{"prompt": "x" "custom_id": "a"}',
    ],
)  # fmt: skip
def test_b83_an_id_that_cannot_be_told_is_none(broken: bytes, run, files: Files):
    files.write(broken, {"custom_id": "c", **GOOD})
    assert run().code == 1
    assert [result["custom_id"] for result in files.read()] == [None, "c"]


def test_b79_equal_hashes_are_not_equal_ids(run, files: Files, monkeypatch):
    strong = inputs.blake2b

    def weak(data: bytes, *, digest_size: int, key: bytes = b"") -> Any:
        return strong(data if key else b"", digest_size=digest_size, key=key)

    monkeypatch.setattr(inputs, "blake2b", weak)
    files.write(*({"custom_id": f"id-{i}", **GOOD} for i in range(10)))
    assert run().code == 0
    assert len(files.by_id()) == 10


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_b80_results_are_written_as_they_finish_and_the_window_is_bounded(
    overlap: str, run, files: Files, monkeypatch
):
    """When the first result is on disk most of the input has not been started."""
    from jaxserve.offline.output import Output

    count, write = 1000, Output.write
    most_open, first_written_at = [], []
    take = LookAhead.take
    taken = 0

    def counting(self, **how: bool):
        nonlocal taken
        item = take(self, **how)
        taken += item is not None
        return item

    def watching(self, *result):
        write(self, *result)
        self.flush()
        on_disk = files.output.read_bytes().count(b"\n")
        if len(first_written_at) < 1:
            first_written_at.append(taken)
        most_open.append(taken - on_disk)

    monkeypatch.setattr(LookAhead, "take", counting)
    monkeypatch.setattr(Output, "write", watching)
    files.write(*({"prompt": f"{i}", "max_tokens": 1 + i % 9} for i in range(count)))
    ran = run("--set", "scheduler.max_seqs=8", "--set", f"runner.overlap={overlap}")
    assert ran.code == 0, ran.err
    assert len(files.by_id()) == count
    assert first_written_at[0] <= 32
    assert max(most_open) <= 32


def test_the_reader_stays_a_bounded_number_of_lines_ahead(files: Files):
    files.write(*({"prompt": f"{i}"} for i in range(1000)))
    parsed = 0

    def encode(task) -> list[int]:
        nonlocal parsed
        parsed += 1
        return [1]

    parse = Parser(SamplingParams(), encode)
    source = reader.Reader(jsonl.read_lines(files.input), parse)
    deadline = time.monotonic() + 5
    while parsed < reader.READ_AHEAD and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert parsed <= reader.READ_AHEAD + 1
    numbers = []
    while (item := source.take(wait=True)) is not None:
        numbers.append(item.place.number)
    assert numbers == list(range(1, 1001))
    assert source.ended
    source.stop()


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_reader_and_taker_never_miss_each_other(ahead: int, monkeypatch: pytest.MonkeyPatch):
    """Threads are switched all the time, and each waits for the other one again and again."""
    monkeypatch.setattr(reader, "READ_AHEAD", ahead)
    monkeypatch.setattr(reader, "WAIT_SECONDS", 60.0)  # a missed notice would take that long
    bad, interval = RequestError("invalid_json", "bad"), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    begun = time.monotonic()
    try:
        lines = [jsonl.Line(jsonl.Place(number), b"") for number in range(1, 4001)]
        source = reader.Reader(lines, lambda line: Failed(line.place, None, bad))
        taken = []
        while not source.ended and time.monotonic() - begun < 50:
            item = source.take(wait=len(taken) % 3 > 0)
            if item is not None:
                taken.append(item.place.number)
    finally:
        sys.setswitchinterval(interval)
    source.stop()
    assert taken == list(range(1, 4001))


def test_a_reader_that_nobody_empties_can_be_stopped(files: Files):
    files.write(*({"prompt": f"{i}"} for i in range(1000)))
    parse = Parser(SamplingParams(), lambda task: [1])
    source = reader.Reader(jsonl.read_lines(files.input), parse)
    source.stop()
    assert threading.active_count() == 1 or not any(
        thread.name == "jaxserve-reader" for thread in threading.enumerate()
    )


def test_b66_numbers_that_json_cannot_write(run, files: Files):
    """The fake model's logprobs are minus infinity beyond the first place."""
    messages = [{"role": "user", "content": "x"}]
    files.write(
        {"prompt": "ab", "max_tokens": 3, "logprobs": 3, "prompt_logprobs": 2},
        {"messages": messages, "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    )
    assert run().code == 0
    text, chat = (files.by_id()[f"line-{n}"]["response"]["body"] for n in (1, 2))
    columns = text["choices"][0]["logprobs"]
    assert len(columns["tokens"]) == len(columns["token_logprobs"]) == 3
    assert all(min(top.values()) == -9999.0 for top in columns["top_logprobs"])
    assert text["prompt_logprobs"][0] is None
    assert len(text["prompt_logprobs"]) == 2
    content = chat["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert math.isfinite(entry["logprob"])
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 2


def test_bad_logits_are_an_error_result(run, files: Files, assembled, monkeypatch):
    import sys

    build = sys.modules["jaxserve.build"]

    def assemble(*args: Any, **options: Any) -> Any:
        made = fakes.assemble(*args, **options)
        made.runner.bad_position = 20
        return made

    monkeypatch.setattr(build, "assemble", assemble)
    files.write({"custom_id": "long", "prompt": "x" * 18, "ignore_eos": True}, GOOD)
    assert run().code == 1
    results = files.by_id()
    assert results["long"]["error"]["code"] == "generation_error"
    assert results["long"]["error"]["status_code"] == 500
    assert results["line-2"]["error"] is None


def test_n_samples_are_choices_in_order(run, files: Files):
    files.write({"prompt": "x", "n": 3, "seed": 5, "max_tokens": 8})
    assert run().code == 0
    choices = files.read()[0]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3


def test_more_samples_than_the_queue_takes_are_an_error_result(run, files: Files):
    files.write({"prompt": "x", "n": 5}, GOOD)
    assert run("--set", "scheduler.max_waiting=3").code == 1
    assert files.by_id()["line-1"]["error"] is not None
    assert files.by_id()["line-2"]["error"] is None


def test_a_small_queue_only_slows_a_job_down(run, files: Files):
    files.write(*({"prompt": f"{i}", "n": 1 + i % 3} for i in range(100)))
    assert run("--set", "scheduler.max_waiting=3", "--set", "scheduler.max_seqs=2").code == 0
    assert len(files.by_id()) == 100


def test_defaults_from_the_command_line(run, files: Files):
    files.write({"prompt": "x", "ignore_eos": True}, {"prompt": "x", "max_tokens": 2})
    assert run("--max-tokens", 7, "--temperature", 0).code == 0
    used = {
        n: r["response"]["body"]["usage"]["completion_tokens"] for n, r in files.by_id().items()
    }
    assert used == {"line-1": 7, "line-2": 2}


def test_any_model(run, files: Files):
    files.write({"prompt": "x", "model": "gpt-9", "max_tokens": 2})
    assert run("--any-model").code == 0


@settings(derandomize=True, deadline=None)
@given(
    name=st.one_of(st.text(max_size=5), st.integers(), st.none(), st.just("x" * 600)),
    more=st.sampled_from(
        ["", ', "a": NaN', ', "custom_id": "b"', ', "p": "\\ud800"', ', "p": 1e999']
    ),
    plain=st.booleans(),
)
def test_b79_the_first_look_misses_no_id(name: object, more: str, plain: bool):
    text = f'{{"custom_id": {json.dumps(name)}{more}' + ("}" if plain else ', "body": {}}')
    line = jsonl.Line(jsonl.Place(3), text.encode())
    strict_id = inputs._strict_id(line)
    assert strict_id is None or inputs._quick_id(line.number, line.data) == strict_id


@pytest.mark.parametrize("bad", [line for line, _, _ in BAD if isinstance(line, bytes)])
def test_b83_the_first_look_survives_every_bad_line(bad: bytes):
    assert inputs._quick_id(1, bad) is None


@pytest.mark.parametrize(
    "name",
    [
        "SmolLM2-135M-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "/models/SmolLM2-135M-Instruct/",
        "a/SmolLM2-135M-Instruct.Q4_1.gguf",
        "smollm2-135m-instruct-q8_0.gguf",
        "SmolLM2-135M-Instruct.BF16.gguf",
        "SmolLM2-135M-Instruct.gguf",
    ],
)
def test_a_model_is_known_by_any_of_its_names(name: str):
    assert short_name(name) == "smollm2-135m-instruct"
