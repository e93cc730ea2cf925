"""B63: the n samples of a prompt are different, reproducible, and share one prompt computation."""

import dataclasses
from collections.abc import Callable

import pytest

from jaxserve.config import SamplingConfig
from jaxserve.request import Request, SamplingParams
from tests.equivalence.rig import BLOCK, Answer, Rig, drain, generate
from tests.reference import tiny

FOUR = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=14, ignore_eos=True)
PROMPT = tiny.make_prompt(3 * BLOCK + 2, 21)


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("gqa_9_3", budgets=(16, 24), sampling=SamplingConfig())


def test_b63_samples_differ_and_repeat(rig: Rig) -> None:
    first, second = (
        [answer.tokens for answer in generate(rig.engine(), [PROMPT], FOUR)] for _ in range(2)
    )
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4


def test_b63_sample_0_is_the_single_sample(rig: Rig) -> None:
    """The number of samples, neighbours and the cache do not change any of them."""
    four = [answer.tokens for answer in generate(rig.engine(), [PROMPT], FOUR)]
    two = [a.tokens for a in generate(rig.engine(), [PROMPT], dataclasses.replace(FOUR, n=2))]
    one = [a.tokens for a in generate(rig.engine(), [PROMPT], dataclasses.replace(FOUR, n=1))]
    assert four[:2] == two and four[:1] == one
    busy = generate(rig.engine(), [PROMPT, tiny.make_prompt(30, 4)], FOUR)
    assert [answer.tokens for answer in busy[:4]] == four
    uncached = rig.engine(cache={"prefix_caching": False})
    assert [answer.tokens for answer in generate(uncached, [PROMPT], FOUR)] == four


def test_b63_the_prompt_is_computed_once(rig: Rig) -> None:
    engine = rig.engine()
    answers = generate(engine, [PROMPT], FOUR)
    assert [a.request.num_cached for a in answers] == [0] + 3 * [3 * BLOCK]
    assert [a.request.sample for a in answers] == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_b63_one_sample_may_end_early(rig: Rig, steps: int) -> None:
    """Cancelling any one leaves the others as they were."""
    expected = [answer.tokens for answer in generate(rig.engine(), [PROMPT], FOUR)]
    for gone in range(4):
        engine = rig.engine()
        requests: list[Request] = engine.add(PROMPT, FOUR)
        answers = {request: Answer(request) for request in requests}
        drain(engine, answers, steps)
        engine.finish(requests[gone], "abort")
        drain(engine, answers)
        for sample, request in enumerate(requests):
            if sample != gone:
                assert answers[request].tokens == expected[sample]
