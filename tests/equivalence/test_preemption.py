"""B36, B31, B38, B29: taking blocks away in the middle changes nothing but the time it takes."""

import dataclasses
from collections.abc import Callable

import pytest

from jaxserve.config import SamplingConfig
from jaxserve.request import SamplingParams
from tests.equivalence.rig import BLOCK, GREEDY, MAX_LEN, SCORED, Rig, generate, refuse_growth
from tests.reference import tiny

OUTPUT = 30
SMALL_POOL = 14  # blocks; six requests of up to 9 blocks want far more
PROMPTS = [tiny.make_prompt(length, 300 + length) for length in (33, 5, 17, 40, 8, 24)]
LONG = dataclasses.replace(GREEDY, max_tokens=OUTPUT)


@pytest.fixture(scope="module")
def small(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("untied", budgets=(16,), num_blocks=SMALL_POOL)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize(
    "rules",
    [{"mode": "fixed", "chunk_size": 1}, {"mode": "fixed", "chunk_size": BLOCK + 1}, {}],
    ids=["chunk-1", "chunk-9", "dynamic"],
)
def test_b36_a_tiny_pool_changes_no_answer(
    small: Rig, rules: dict, prefix_caching: bool, overlap: bool
) -> None:
    engine = small.engine(
        scheduler=rules | {"reserve_full_prompt": False},
        cache={"prefix_caching": prefix_caching},
        runner={"overlap": overlap},
    )
    sampling = [LONG, dataclasses.replace(SCORED, max_tokens=OUTPUT)] * 3
    small.check(generate(engine, PROMPTS, sampling))
    small.check(generate(engine, PROMPTS, sampling))
    assert engine.stats.preemptions >= 3


ODD = SamplingParams(  # everything that a resumed request must remember
    temperature=0.9,
    top_k=20,
    top_p=0.95,
    seed=11,
    max_tokens=20,
    min_tokens=9,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logprobs=3,
    stop_token_ids=(7, 8),
)


def _assert_same(found, expected) -> None:
    for answer, plain in zip(found, expected, strict=True):
        assert answer.tokens == plain.tokens
        assert answer.finish_reason == plain.finish_reason
        for entry, other in zip(answer.logprobs, plain.logprobs, strict=True):
            assert abs(entry.logprob - other.logprob) < 1e-4


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_t12_preempted_at_every_growth(make_rig: Callable[..., Rig], overlap: bool) -> None:
    """B36: with penalties, min_tokens, stop ids, seeds and logprobs, whoever is preempted when."""
    rig = make_rig("untied", budgets=(16,), sampling=SamplingConfig(), chunk_size=13)
    prompts = [tiny.make_prompt(length, 40 + length) for length in (9, 23, 16)]
    # Greedy, so that nothing but what was put out decides between two tokens that are near.
    counting = dict(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.0)
    sampling = [ODD, GREEDY, dataclasses.replace(ODD, seed=None, temperature=0.0, **counting)]
    rules = {"reserve_full_prompt": False}
    engine = rig.engine(scheduler=rules, runner={"overlap": overlap})
    expected = generate(engine, prompts, sampling)
    assert engine.stats.preemptions == 0
    rig.check(expected[1:2])
    nth = 1
    while True:
        engine = rig.engine(scheduler=rules, runner={"overlap": overlap})
        wishes = refuse_growth(engine, {nth})
        _assert_same(generate(engine, prompts, sampling), expected)
        if wishes() < nth:
            break
        assert engine.stats.preemptions >= 1
        nth += 1
    assert nth > 8


def test_b31_the_last_request_ends_where_the_pool_does(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("untied", budgets=(16,), num_blocks=4)
    prompt = tiny.make_prompt(10, 1)
    engine = rig.engine()
    (answer,) = generate(engine, [prompt], dataclasses.replace(GREEDY, max_tokens=80))
    rig.check([answer])
    assert answer.finish_reason == "length"
    assert len(prompt) + len(answer.tokens) == 4 * BLOCK + 1  # the last token needs no KV


def test_b29_what_can_never_fit_is_refused_and_others_go_on(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("untied", budgets=(16,), num_blocks=4)
    engine = rig.engine()
    with pytest.raises(ValueError, match="KV pool"):
        engine.add(tiny.make_prompt(4 * BLOCK + 1, 1), GREEDY)
    with pytest.raises(ValueError, match="max_len"):
        engine.add(tiny.make_prompt(MAX_LEN, 1), GREEDY)
    rig.check(generate(engine, [tiny.make_prompt(4 * BLOCK, 1), [5]]))
