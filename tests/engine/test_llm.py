"""The Python API: the same answers however they are asked for, and nothing half done."""

import dataclasses
import itertools
import signal
import sys
import threading
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.completion import Completion
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.cli import fakes

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
PROMPTS = ["one", "the second prompt", "3", "a somewhat longer fourth prompt " * 4, "fünf"]


def make(**sections: object) -> LLM:
    from jaxserve.settings import merge

    return LLM.from_assembly(fakes.assemble(merge(EngineConfig(), sections, "test")))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def idle(llm: LLM) -> bool:
    engine = llm._open().engine
    return engine.num_running == engine.num_waiting == 0 and llm._driver.num_running == 0


def content(completion: Completion) -> tuple:
    """Everything but times and what the prefix cache saved."""
    usage = completion.usage._replace(cached_tokens=0)
    return (completion.prompt_token_ids, completion.outputs, completion.prompt_logprobs, usage)


def contents(completions: list[Completion]) -> list[tuple]:
    return [content(completion) for completion in completions]


def test_a_list_gives_what_each_prompt_gives_alone(llm: LLM):
    together = llm.generate(PROMPTS, GREEDY)
    assert contents(together) == [content(llm.generate(p, GREEDY)[0]) for p in PROMPTS]
    assert contents(llm.generate(PROMPTS[::-1], GREEDY)) == contents(together)[::-1]
    assert idle(llm)


def test_text_and_token_ids_are_the_same_prompt(llm: LLM):
    ids = llm._open().tokenizer.encode("hello")
    by_text = llm.generate("hello", GREEDY)
    assert contents(llm.generate(ids, GREEDY)) == contents(by_text)
    assert contents(llm.generate([ids, "hello"], GREEDY)) == contents(by_text) * 2
    assert by_text[0].prompt_token_ids == tuple(ids)
    assert by_text[0].text == by_text[0].outputs[0].text


@pytest.mark.parametrize("empty", [[], ()])
def test_no_prompts_no_completions(empty: list[str], llm: LLM):
    assert llm.generate(empty) == []


SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 99),
    n=st.integers(1, 3),
    stop=st.sampled_from([(), ("e",), ("ab", "x"), ("é",), (". ",)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(prompt=st.text(min_size=1, max_size=30), sampling=SAMPLING)
def test_streamed_is_not_streamed(prompt: str, sampling: SamplingParams, llm: LLM):
    expected = llm.generate(prompt, sampling)[0]
    stream = llm.stream(prompt, sampling)
    chunks = list(stream)
    assert content(stream.completion()) == content(expected)
    for sample in expected.outputs:
        mine = [chunk for chunk in chunks if chunk.index == sample.index]
        assert "".join(chunk.text for chunk in mine) == sample.text
        assert sum((chunk.token_ids for chunk in mine), ()) == sample.token_ids
        reasons = [chunk.finish_reason for chunk in mine]
        assert reasons == [None] * (len(mine) - 1) + [sample.finish_reason]
    assert idle(llm)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(prompt=st.text(min_size=1, max_size=30), sampling=SAMPLING)
def test_b69_the_text_ends_just_before_the_first_stop_string(
    prompt: str, sampling: SamplingParams, llm: LLM
):
    """Against a search in the whole text of a run without stop strings."""
    free = llm.generate(prompt, dataclasses.replace(sampling, stop=()))[0]
    cut = llm.generate(prompt, sampling)[0]
    for whole, sample in zip(free.outputs, cut.outputs, strict=True):
        found = [(whole.text.find(s) + len(s), whole.text.find(s)) for s in sampling.stop]
        ends = [pair for pair in found if pair[1] >= 0]
        if not ends:
            assert sample == whole
            continue
        assert sample.text == whole.text[: min(ends)[1]]
        assert sample.finish_reason == "stop"
        kept = len(sample.token_ids)
        assert sample.token_ids == whole.token_ids[:kept]
        decode = llm._open().tokenizer.decode
        assert any(s in decode(sample.token_ids) for s in sampling.stop)
        assert not any(s in decode(sample.token_ids[:-1]) for s in sampling.stop)
        if sampling.logprobs is not None:
            assert sample.logprobs is not None
            assert len(sample.logprobs) == kept
    assert cut.usage.completion_tokens == sum(len(s.token_ids) for s in cut.outputs)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "bad", ["", [], "x" * 300, [-1], [10_000], "\ud800", [1.5], ["a"], 7, [True] * 300]
)
def test_b43_one_bad_prompt_refuses_the_list_and_leaves_nothing(place: int, bad, llm: LLM):
    prompts = ["good", "fine"]
    prompts.insert(place, bad)
    with pytest.raises(ValueError, match=rf"prompts\[{place}\]"):
        llm.generate(prompts, GREEDY)
    assert idle(llm)
    assert [c.prompt_token_ids for c in llm.generate(["next"], GREEDY)] == [tuple(ids(llm, "next"))]


def ids(llm: LLM, text: str) -> list[int]:
    return llm._open().tokenizer.encode(text)


def test_b43_a_full_queue_refuses_the_whole_list():
    from jaxserve.engine import QueueFull

    llm = make(scheduler={"max_waiting": 3, "max_seqs": 1})
    with pytest.raises(QueueFull):
        llm.generate(["a", "b", "c", "d", "e", "f"], GREEDY)
    assert idle(llm)
    assert len(llm.generate(["a", "b"], GREEDY)) == 2


def test_one_sampling_for_each_prompt(llm: LLM):
    samplings = [dataclasses.replace(GREEDY, max_tokens=k, ignore_eos=True) for k in (1, 5, 9)]
    done = llm.generate(["a", "b", "c"], samplings)
    assert [len(c.outputs[0].token_ids) for c in done] == [1, 5, 9]
    with pytest.raises(ValueError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["a", "b", "c"], samplings[:2])


def test_chats(llm: LLM):
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
        for text in ("a", "b")
    ]
    both = llm.chat(talks, GREEDY)
    assert contents(both) == [content(llm.chat(talk, GREEDY)[0]) for talk in talks]
    stream = llm.stream(talks[0], GREEDY)
    assert "".join(chunk.text for chunk in stream) == both[0].text
    with pytest.raises(ValueError, match=r"messages\[1\]"):
        llm.chat([talks[0], [{"role": "user"}]], GREEDY)
    with pytest.raises(ValueError, match="list"):
        llm.chat("hello", GREEDY)  # type: ignore[arg-type]
    assert llm.chat([], GREEDY) == []


def test_b63_samples_differ_are_in_order_and_repeat(llm: LLM):
    sampling = SamplingParams(n=4, seed=7, max_tokens=30)
    first, again = (llm.generate("pick", sampling)[0] for _ in range(2))
    assert content(first) == content(again)
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3]
    assert len({sample.token_ids for sample in first.outputs}) == 4
    alone = llm.generate("pick", dataclasses.replace(sampling, n=1))[0]
    assert alone.outputs[0] == first.outputs[0]


def test_b78_max_tokens_0_scores_the_prompt(llm: LLM):
    scored = llm.generate("score", SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert scored.outputs[0].token_ids == ()
    assert scored.outputs[0].finish_reason == "length"
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    assert scored.prompt_logprobs[0] is None
    assert scored.timings.ttft_s is None
    assert list(llm.stream("score", SamplingParams(max_tokens=0, prompt_logprobs=2)))


def test_bad_logits_fail_their_request_alone():
    llm = make()
    runner = llm._open().runner
    expected = llm.generate("ab", GREEDY)[0]
    runner.bad_position = 10  # type: ignore[union-attr]
    short, broken = llm.generate(["ab", "0123456"], [SamplingParams(max_tokens=5), GREEDY])
    assert short.outputs[0].finish_reason in ("length", "stop")
    assert broken.outputs[0].finish_reason == "error"
    assert broken.outputs[0].error
    runner.bad_position = None  # type: ignore[union-attr]
    assert content(llm.generate("ab", GREEDY)[0]) == content(expected)


def test_b41_a_stream_left_early_is_cancelled(llm: LLM):
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    for leave in (lambda s: s.close(), lambda s: next(s), lambda s: [next(s), s.close()]):
        stream = llm.stream("go on", endless)
        leave(stream)
        del stream
        assert idle(llm)
    with llm.stream("go on", endless) as stream:
        next(stream)
    assert idle(llm)
    assert list(stream) == []
    assert stream.completion().outputs[0].finish_reason == "abort"


def test_streams_and_lists_interleave(llm: LLM):
    a, b = llm.stream("first", GREEDY), llm.stream("second", GREEDY)
    texts = {"first": next(a).text, "second": next(b).text}
    llm.generate(PROMPTS, GREEDY)
    texts["second"] += "".join(chunk.text for chunk in b)
    texts["first"] += "".join(chunk.text for chunk in a)
    assert texts == {p: llm.generate(p, GREEDY)[0].text for p in texts}


def test_threads_share_one_llm(llm: LLM):
    expected = contents(llm.generate(PROMPTS, GREEDY))
    failures: list[object] = []

    def work(number: int) -> None:
        for turn in range(10):
            place = (number + turn) % len(PROMPTS)
            if turn % 2:
                found = content(llm.generate(PROMPTS[place], GREEDY)[0])
            else:
                stream = llm.stream(PROMPTS[place], GREEDY)
                list(stream)
                found = content(stream.completion())
            if found != expected[place]:
                failures.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert idle(llm)


def test_an_interrupt_cancels_the_call_and_keeps_the_llm(monkeypatch):
    llm = make()
    engine = llm._open().engine
    expected = contents(llm.generate(PROMPTS, GREEDY))
    real = {name: getattr(engine, name) for name in ("add", "step", "finish")}
    other = llm.stream("other", GREEDY)
    texts, reached = [next(other).text], []
    for name, nth in itertools.product(("add", "step", "finish"), range(4)):
        count = itertools.count()

        def pressed(*args, call=real[name], nth=nth, count=count, **options):
            if next(count) == nth:
                signal.raise_signal(signal.SIGINT)
                reached.append(call.__name__)
            return call(*args, **options)

        monkeypatch.setattr(engine, name, pressed)
        stopped = dataclasses.replace(GREEDY, stop=("a", "e", "i", "o"), max_tokens=3)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, stopped if name == "finish" else GREEDY)
            if name == "finish":  # perhaps no stop string came up
                signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(engine, name, real[name])
        assert llm._driver.num_running <= 1
    assert set(reached) == {"add", "step", "finish"}
    texts += [chunk.text for chunk in other]
    assert "".join(texts) == llm.generate("other", GREEDY)[0].text
    assert idle(llm)
    assert contents(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_second_interrupt_does_not_wait(monkeypatch):
    llm = make()

    def hanging():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still here")

    monkeypatch.setattr(llm._open().engine, "step", hanging)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", GREEDY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_close_is_final_and_idempotent():
    llm = make()
    stream = llm.stream("x", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert llm._assembly is None
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")
    with pytest.raises(RuntimeError, match="closed"):
        _ = llm.config
    assert list(stream) == []


def test_settings_that_are_wrong_are_refused_before_a_model_is_loaded():
    with pytest.raises(ValueError, match="token_budgets"):
        LLM(scheduler={"token_budgets": 3})
    with pytest.raises(ValueError, match="sections are"):
        LLM(nonsense={"a": 3})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (None, ModelConfig(name="base", dtype="float32")),
        ("m", ModelConfig(name="m", dtype="float32")),
        (Path("a/m.gguf"), ModelConfig(name="a/m.gguf", dtype="float32")),
        ({"name": "m", "dtype": "bfloat16"}, ModelConfig(name="m", dtype="bfloat16")),
        ({"dtype": "bfloat16"}, ModelConfig(name="base", dtype="bfloat16")),
        (ModelConfig(name="m"), ModelConfig(name="m")),
    ],
)
def test_the_model_goes_over_the_config(model, expected: ModelConfig, monkeypatch):
    build = types.ModuleType("jaxserve.build")
    build.assemble = fakes.assemble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.build", build)
    base = EngineConfig(model=ModelConfig(name="base", dtype="float32"))
    with LLM(model, config=base, cache={"block_size": 16}) as llm:
        assert (llm.config.model.name, llm.config.model.dtype) == (expected.name, expected.dtype)
        assert llm.config.cache.block_size == 16
