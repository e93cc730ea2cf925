"""`jaxserve generate`: the answer on stdout, everything else on stderr."""

import io
import json

import pytest

from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.cli import fakes

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> LLM:
    from jaxserve.config import EngineConfig

    return LLM.from_assembly(fakes.assemble(EngineConfig()))


def test_streamed_text_is_the_text_of_the_python_api(jaxserve, llm: LLM):
    ran = jaxserve("generate", "hello", "--raw", "--max-tokens", 40, "--temperature", 0)
    assert ran.code == 0
    assert ran.out == llm.generate("hello", GREEDY)[0].text + "\n"


def test_a_chat_is_the_default_where_the_model_has_a_template(jaxserve, llm: LLM):
    options = ("--max-tokens", 40, "--temperature", 0)
    expected = llm.chat([{"role": "user", "content": "hello"}], GREEDY)[0].text + "\n"
    assert jaxserve("generate", "hello", *options).out == expected
    assert jaxserve("generate", "hello", "--chat", *options).out == expected
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    ran = jaxserve("generate", "hello", "--system", "be brief", *options)
    assert ran.out == llm.chat(system, GREEDY)[0].text + "\n"
    assert ran.out != expected


def test_a_model_without_a_template_continues_the_text(jaxserve, llm: LLM, monkeypatch):
    import sys

    build = sys.modules["jaxserve.build"]
    monkeypatch.setattr(build, "assemble", lambda *a, **k: fakes.assemble(*a, **k, chat=False))
    options = ("--max-tokens", 40, "--temperature", 0)
    expected = llm.generate("hello", GREEDY)[0].text + "\n"
    assert jaxserve("generate", "hello", *options).out == expected
    for chat in (["--chat"], ["--system", "x"]):
        ran = jaxserve("generate", "hello", *chat)
        assert (ran.code, ran.out) == (2, "")
        assert "no chat template" in ran.err


def test_json_prints_one_object_with_the_figures(jaxserve, llm: LLM):
    ran = jaxserve("generate", "hi", "--raw", "--json", "--seed", 3, "--n", 3, "--max-tokens", 9)
    report = json.loads(ran.out)
    completion = llm.generate("hi", SamplingParams(seed=3, n=3, max_tokens=9))[0]
    assert ran.out.count("\n") == 1
    assert [o["text"] for o in report["outputs"]] == [o.text for o in completion.outputs]
    assert report["text"] == report["outputs"][0]["text"]
    assert len({o["text"] for o in report["outputs"]}) > 1
    assert report["prompt_tokens"] == 2
    assert report["output_tokens"] == sum(len(o["token_ids"]) for o in report["outputs"])
    assert 0 <= report["ttft_s"] <= report["total_s"]


def test_a_dash_reads_the_prompt_from_stdin(jaxserve, monkeypatch):
    options = ("--raw", "--max-tokens", 9, "--temperature", 0)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("héllo".encode())))
    assert jaxserve("generate", "-", *options).out == jaxserve("generate", "héllo", *options).out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    ran = jaxserve("generate", "-", *options)
    assert ran.code == 2
    assert "UTF-8" in ran.err


@pytest.mark.parametrize(
    "argv", [["", "--raw"], ["x" * 300, "--raw"], ["x", "--raw", "--stop", "\udc80"]]
)
def test_b78_prompts_that_can_never_run(argv: list[str], jaxserve):
    ran = jaxserve("generate", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("jaxserve: error: ")
    assert ran.err.count("\n") == 1


def test_the_engine_is_closed_at_the_end(jaxserve, assembled):
    jaxserve("generate", "hello", "--max-tokens", 3)
    assert [made.runner.closed for made in assembled] == [True]
    assert assembled[0].engine.num_running == 0
