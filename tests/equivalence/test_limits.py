"""B39, B42, B11, B43: exact counts at every limit, and nothing before or after its time."""

import dataclasses
from collections.abc import Callable

import pytest

from jaxserve.request import SamplingParams
from tests.equivalence.rig import BLOCK, EOS, GREEDY, MAX_LEN, SCORED, Answer, Rig, drain, generate
from tests.reference import tiny

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("untied", budgets=(16,))


@OVERLAP
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_b39_exactly_max_tokens(rig: Rig, max_tokens: int, overlap: bool) -> None:
    engine = rig.engine(runner={"overlap": overlap})
    prompts = [tiny.make_prompt(length, length) for length in (1, BLOCK, 31)]
    answers = generate(engine, prompts, dataclasses.replace(SCORED, max_tokens=max_tokens))
    rig.check(answers)
    assert [len(answer.tokens) for answer in answers] == [max_tokens] * 3
    assert {answer.finish_reason for answer in answers} == {"length"}


@OVERLAP
@pytest.mark.parametrize("length", [MAX_LEN - 1, MAX_LEN - 2, MAX_LEN - GREEDY.max_tokens])
def test_b39_exactly_max_len(rig: Rig, length: int, overlap: bool) -> None:
    engine = rig.engine(runner={"overlap": overlap})
    (answer,) = generate(engine, [tiny.make_prompt(length, 5)], GREEDY)
    rig.check([answer])
    assert answer.finish_reason == "length"
    assert length + len(answer.tokens) == MAX_LEN


@OVERLAP
def test_b39_nothing_after_a_stop(rig: Rig, overlap: bool) -> None:
    """A stop id at every place of a known continuation, beside requests that go on."""
    engine = rig.engine(runner={"overlap": overlap})
    prompts = [tiny.make_prompt(length, 60 + length) for length in (19, 3, 40)]
    whole = rig.reference.greedy(prompts[0], GREEDY.max_tokens)
    for place, token in enumerate(whole):
        if token in whole[:place]:
            continue
        stopped = dataclasses.replace(GREEDY, stop_token_ids=(token,))
        answers = generate(engine, prompts, [stopped, GREEDY, GREEDY])
        rig.check(answers)
        assert answers[0].tokens == whole[: place + 1]
        assert answers[0].finish_reason == "stop"


@OVERLAP
def test_b39_eos_ends_unless_ignored(rig: Rig, overlap: bool) -> None:
    engine = rig.engine(runner={"overlap": overlap})
    prompts = [tiny.make_prompt(12, seed) for seed in range(40)]
    honoured = SamplingParams(temperature=0.0, max_tokens=12)
    expected = [rig.reference.greedy(prompt, 12) for prompt in prompts]
    ended = 0
    for answer, tokens in zip(generate(engine, prompts, honoured), expected, strict=True):
        if EOS in tokens:
            tokens = tokens[: tokens.index(EOS) + 1]
            ended += len(tokens) < 12
        assert answer.tokens == tokens
        assert answer.finish_reason == ("stop" if tokens[-1] == EOS else "length")
    assert ended > 0, "no prompt of this test meets EOS; choose other seeds"


def test_b42_thousand_requests_of_one_token(rig: Rig) -> None:
    engine = rig.engine()
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = [tiny.make_prompt(1 + number % 9, number) for number in range(200)]
    long = [tiny.make_prompt(20, 1)]
    answers = generate(engine, prompts + long, [one] * 200 + [GREEDY])
    rig.check(answers)


def test_b11_no_output_before_the_prompt_is_complete(rig: Rig) -> None:
    engine = rig.engine(scheduler={"mode": "fixed", "chunk_size": 3}, runner={"overlap": False})
    (request,) = engine.add(tiny.make_prompt(31, 2), GREEDY)
    while request.num_computed < 31:
        outputs = engine.step()
        assert bool(outputs) == (request.num_computed == 31)
    drain(engine, {request: Answer(request)})


def test_b43_a_refused_prompt_leaves_nothing_behind(rig: Rig) -> None:
    engine = rig.engine()
    good = tiny.make_prompt(9, 9)
    for bad in ([], [tiny.VOCAB], [-1], tiny.make_prompt(MAX_LEN + 1, 1)):
        with pytest.raises(ValueError):
            engine.add(bad, GREEDY)
        assert not engine.has_work
        rig.check(generate(engine, [good]))


@OVERLAP
def test_cancels_free_everything_and_touch_nobody(rig: Rig, overlap: bool) -> None:
    """B38, B41: one of three is cancelled after each number of steps."""
    prompts = [tiny.make_prompt(length, 80 + length) for length in (30, 11, 26)]
    for steps in range(0, 16, 3):
        engine = rig.engine(runner={"overlap": overlap})
        requests = [engine.add(prompt, GREEDY)[0] for prompt in prompts]
        answers = {request: Answer(request) for request in requests}
        drain(engine, answers, steps)
        engine.finish(requests[1], "abort")
        engine.finish(requests[1], "abort")
        before = list(answers[requests[1]].tokens)
        drain(engine, answers)
        assert answers[requests[1]].tokens == before
        rig.check([answers[requests[0]], answers[requests[2]]])
        assert len(answers[requests[0]].tokens) == len(answers[requests[2]].tokens) == 12
