"""Lines of a job: strict JSON, bounded memory, every fault named."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.offline import jsonl
from jaxserve.offline.jsonl import Line, Place, parse_object, read_lines
from jaxserve.offline.tasks import custom_id, parse_task
from jaxserve.openai_api.errors import RequestError
from jaxserve.request import SamplingParams

DEFAULTS = SamplingParams()


def parse(data: str | bytes) -> dict[str, Any]:
    return parse_object(Line(Place(1), data.encode() if isinstance(data, str) else data))


def task(value: dict[str, Any], defaults: SamplingParams = DEFAULTS):
    return parse_task(parse(json.dumps(value)), defaults)


def envelope(body: dict[str, Any], url: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body} | more


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "invalid JSON"),
        ("", "invalid JSON"),
        ("[1]", "must be a JSON object"),
        ("7", "must be a JSON object"),
        ('{"a": 1} {"b": 2}', "invalid JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1e999}', "too large"),
        ('{"a": %s}' % ("9" * 5000), "too large"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ('{"b": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        (b'{"a": "\xff"}', "not valid UTF-8 at byte 7"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    ],
)
def test_b83_what_is_not_strict_json_is_refused(data: str | bytes, words: str):
    with pytest.raises(RequestError) as error:
        parse(data)
    assert words in str(error.value)
    assert error.value.code == "invalid_json"
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"prompt": "a\ud800"}, "prompt"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
        ({"prompt": "a", "stop": ["\ud800"]}, "stop[0]"),
        ({"custom_id": "\udc00"}, "custom_id"),
        ({"body": {"\ud800": 1}}, "body"),
    ],
)
def test_b77_half_a_surrogate_pair_is_refused_naming_the_field(value: dict[str, Any], field: str):
    with pytest.raises(RequestError) as error:
        parse(json.dumps(value))
    assert str(error.value).startswith(f"{field} ")
    assert str(error.value).isascii()


def test_b77_odd_but_valid_text_passes():
    text = "\x00 \U0001f600 \u0301\u0301 \ufeff \u2028"
    assert parse(json.dumps({"prompt": text}))["prompt"] == text
    assert parse(json.dumps({"prompt": text}, ensure_ascii=False))["prompt"] == text


def test_b83_blank_lines_crlf_and_a_byte_order_mark(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \t\n{"a": 2}\n\n{"a": 3}')
    lines = list(read_lines(path))
    assert [line.number for line in lines] == [1, 4, 6]
    assert [parse_object(line)["a"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_files_without_lines(content: bytes, tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert list(read_lines(path)) == []


def test_b83_a_line_of_50_mb_is_refused_and_the_next_one_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "in.jsonl"
    for size in (998, 999, 1000, 1001, 1999, 2000, 2001, 2002, 50_000):
        for end in (b"\n", b"\r\n"):
            path.write_bytes(b"x" * size + end + b"{}\n")
            first, second = read_lines(path)
            fits = size + len(end) - 1 <= 1000
            assert first == Line(Place(1), b"x" * size + end if fits else None)
            assert second == Line(Place(2, 1), b"{}\n")
        path.write_bytes(b"x" * size)
        assert list(read_lines(path)) == [Line(Place(1), b"x" * size if size <= 1000 else None)]
    with pytest.raises(RequestError) as error:
        parse_object(Line(Place(1), None))
    assert error.value.code == "line_too_long"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@settings(derandomize=True, deadline=None)
@given(value=st.dictionaries(st.text(max_size=5), _JSON), ascii_only=st.booleans())
def test_strict_parsing_keeps_every_valid_object(value: dict[str, Any], ascii_only: bool):
    assert parse(json.dumps(value, ensure_ascii=ascii_only)) == value


def test_the_forms_of_a_line_ask_for_the_same():
    plain = task({"prompt": "hi", "max_tokens": 5, "stop": "x", "seed": 3})
    openai = task(envelope({"prompt": ["hi"], "max_tokens": 5, "stop": ["x"], "seed": 3}))
    assert plain == openai
    assert plain.text == "hi"
    assert plain.sampling == SamplingParams(max_tokens=5, stop=("x",), seed=3)
    messages = [{"role": "user", "content": "hi"}]
    chat = task(envelope({"messages": messages}, url="/v1/chat/completions"))
    assert chat == task({"messages": messages})
    assert chat.messages == messages
    ids = task({"prompt_token_ids": [1, 2]})
    assert ids == task(envelope({"prompt": [1, 2]}))
    assert ids.token_ids == [1, 2]


def test_every_sampling_option_arrives():
    options = {
        "max_tokens": 7,
        "temperature": 1,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": -3},
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "n": 2,
        "seed": 9,
    }
    expected = options | {
        "logit_bias": {5: -3.0},
        "stop": ("a", "b"),
        "stop_token_ids": (4,),
    }
    assert task({"prompt": "x", **options}).sampling == SamplingParams(**expected)
    nothing = dict.fromkeys(options, None)
    assert task({"prompt": "x", **nothing}).sampling == SamplingParams()


def test_defaults_hold_where_a_line_says_nothing():
    defaults = SamplingParams(temperature=0.0, max_tokens=9, seed=1)
    assert task({"prompt": "x", "seed": 2}, defaults).sampling == SamplingParams(
        temperature=0.0, max_tokens=9, seed=2
    )


def test_chat_logprobs_follow_the_chat_api():
    messages = [{"role": "user", "content": "x"}]
    assert task({"messages": messages, "logprobs": True}).sampling.logprobs == 0
    both = {"messages": messages, "logprobs": True, "top_logprobs": 3}
    assert task(both).sampling.logprobs == 3
    assert task({"messages": messages, "logprobs": False}).sampling.logprobs is None
    newer = {"messages": messages, "max_tokens": 3, "max_completion_tokens": 4}
    assert task(newer).sampling.max_tokens == 4


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ({}, "invalid_request", "exactly one of prompt, prompt_token_ids, messages"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "invalid_request", "exactly one"),
        ({"prompt": "a", "messages": MESSAGES}, "unknown_field", "prompt"),
        ({"prompt": "a", "temprature": 1}, "unknown_field", "did you mean temperature?"),
        ({"prompt": "a", "x" * 10_000: 1}, "unknown_field", "xxx..."),
        ({"prompt": 7}, "invalid_request", "prompt: Expected"),
        ({"prompt": ["a", 1]}, "invalid_request", "prompt"),
        ({"prompt": ["a", "b"]}, "invalid_request", "several prompts"),
        ({"prompt_token_ids": [1.5]}, "invalid_request", "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "invalid_request", "prompt_token_ids"),
        ({"prompt": "a", "max_tokens": "5"}, "invalid_request", "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "invalid_request", "max_tokens=-1"),
        ({"prompt": "a", "temperature": True}, "invalid_request", "temperature"),
        ({"prompt": "a", "temperature": "0.5"}, "invalid_request", "temperature"),
        ({"prompt": "a", "stop": ""}, "invalid_request", "stop"),
        ({"prompt": "a", "stream": True}, "invalid_request", "stream"),
        ({"prompt": "a", "n": 1000}, "invalid_request", "n=1000"),
        ({"prompt": "a", "logit_bias": {"abc": 1}}, "invalid_request", "'abc' is not a token id"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "invalid_request", "'-1' is not a token id"),
        ({"prompt": "a", "logprobs": True}, "invalid_request", "logprobs"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "invalid_request", "needs logprobs"),
        ({"messages": "hi"}, "invalid_request", "messages"),
        ({"messages": MESSAGES, "tools": [{}]}, "unsupported_field", "tools"),
        (envelope({"prompt": "a"}, url="/v1/embeddings"), "unsupported_url", "/v1/embeddings"),
        (envelope({"prompt": "a"}, method="GET"), "invalid_request", "POST"),
        (envelope({"prompt": "a"}, extra=1), "unknown_field", "extra"),
        (envelope({"prompt": "a", "stop": 5}), "invalid_request", "body.stop"),
        (envelope({"prompt": "a", "max_token": 5}), "unknown_field", "body.'max_token'"),
        ({"custom_id": "a", "url": "/v1/completions"}, "invalid_request", "body"),
        ({"custom_id": "a", "method": "POST", "body": {}}, "invalid_request", "url"),
    ],
)
def test_b83_bad_lines_name_the_field(value: dict[str, Any], code: str, words: str):
    with pytest.raises(RequestError) as error:
        task(value)
    assert error.value.code == code
    assert words in str(error.value)
    assert len(str(error.value)) < 400


def test_b79_ids():
    assert custom_id({"custom_id": "x", "prompt": "a"}, 3) == "x"
    assert custom_id({"prompt": "a"}, 3) == "line-3"
    for bad in (7, "", None, ["x"], "x" * 1000):
        with pytest.raises(RequestError, match="custom_id"):
            custom_id(envelope({}, custom_id=bad), 3)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_column_is_one_of_the_line(end: bytes):
    with pytest.raises(RequestError, match=r"column 14\)"):
        parse_object(Line(Place(1), b'{"prompt":"x"' + end))


OPTIONS = [
    {},
    {"temperature": 0},
    {"temperature": 1, "n": 1},
    {"temperature": 1.0, "top_p": 1.0, "n": 2},
    {"top_k": 1},
    {"min_tokens": 1},
    {"ignore_eos": True},
    {"ignore_eos": False},
    {"seed": 1},
    {"stop": "1"},
    {"stop": ["1"], "stop_token_ids": [1]},
    {"logit_bias": {"1": 1}},
    {"logit_bias": {"1": 1.5}},
    {"logit_bias": {}},
    {"logprobs": 1},
    {"prompt_logprobs": 1},
]


def test_options_that_were_parsed_before_are_no_other_ones():
    """Options are checked once and then found again: in any order each line gets its own."""
    defaults = [SamplingParams(), SamplingParams(logit_bias={7: 1.0}, seed=5, max_tokens=9)]
    cases = [(default, options) for default in defaults for options in OPTIONS] * 3
    random.Random(0).shuffle(cases)
    for default, options in cases:
        found = parse_task({"prompt": "x", **options}, default).sampling
        wanted = dict(options)
        if "stop" in wanted:
            wanted |= {"stop": ("1",)}
        if "stop_token_ids" in wanted:
            wanted |= {"stop_token_ids": (1,)}
        if "logit_bias" in wanted:
            wanted |= {"logit_bias": {int(key): b for key, b in options["logit_bias"].items()}}
        expected = dataclasses.replace(default, **wanted)
        assert found == expected
        assert [type(v) for v in (found.n, found.ignore_eos)] == [int, bool]
