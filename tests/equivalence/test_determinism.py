"""B14, T05, B28: deterministic bits do not depend on load, cache hits, preemption or order."""

import dataclasses
from collections.abc import Callable

import pytest

from jaxserve.config import SamplingConfig
from jaxserve.request import SamplingParams
from tests.equivalence.rig import BLOCK, GREEDY, NUM_TOP, SCORED, Rig, generate
from tests.reference import tiny

CHUNK = 2 * BLOCK
LENGTHS = (5 * BLOCK + 3, 1, BLOCK, 4 * BLOCK, 4 * BLOCK + 1, 23)
PROMPTS = [tiny.make_prompt(length, 500 + length) for length in LENGTHS]
NOISE = [tiny.make_prompt(length, 900 + length) for length in (3, 50, 29, 7, 64, 12, 31)]
RANDOM = SamplingParams(
    temperature=1.1, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=NUM_TOP
)
EACH = [GREEDY, RANDOM, SCORED, RANDOM, dataclasses.replace(GREEDY, presence_penalty=0.5), GREEDY]


def _rig(make_rig: Callable[..., Rig], name: str, num_blocks: int = 64) -> Rig:
    return make_rig(
        name,
        budgets=(24,),
        num_blocks=num_blocks,
        deterministic=True,
        chunk_size=CHUNK,
        sampling=SamplingConfig(),
    )


@pytest.fixture(scope="module", params=["gqa_9_3", "rope_yarn"])
def rig(request: pytest.FixtureRequest, make_rig: Callable[..., Rig]) -> Rig:
    return _rig(make_rig, request.param)


@pytest.fixture(scope="module")
def alone(rig: Rig) -> list[tuple]:
    """The bits of every request on an engine of its own."""
    return [
        generate(rig.engine(), [prompt], [params])[0].bits()
        for prompt, params in zip(PROMPTS, EACH, strict=True)
    ]


def _bits(answers: list) -> list[tuple]:
    return [answer.bits() for answer in answers]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_t05_busy_equals_alone(rig: Rig, alone: list[tuple], overlap: bool) -> None:
    engine = rig.engine(runner={"overlap": overlap})
    answers = generate(engine, PROMPTS + NOISE, EACH + [RANDOM] * len(NOISE))
    assert _bits(answers[: len(PROMPTS)]) == alone
    rig.check([answers[0], answers[2], answers[5]])


def test_t05_order_does_not_matter(rig: Rig, alone: list[tuple]) -> None:
    engine = rig.engine()
    answers = generate(engine, NOISE + PROMPTS[::-1], [GREEDY] * len(NOISE) + EACH[::-1])
    assert _bits(answers[len(NOISE) :])[::-1] == alone


def test_t05_a_warm_cache_changes_no_bit(rig: Rig, alone: list[tuple]) -> None:
    engine = rig.engine()
    for turn in range(3):
        answers = generate(engine, PROMPTS, EACH)
        assert _bits(answers) == alone
        hits = [answer.request.num_cached for answer in answers]
        assert all(hit % CHUNK == 0 for hit in hits)
        assert (max(hits) > 0) == (turn > 0)


def test_t05_hits_from_other_requests_change_no_bit(rig: Rig, alone: list[tuple]) -> None:
    """The cache holds longer prompts that share a prefix, and the answers to shorter ones."""
    engine = rig.engine()
    extended = [[*prompt, *tiny.make_prompt(20, 77)] for prompt in PROMPTS]
    cut = [prompt[: max(1, len(prompt) // 2)] for prompt in PROMPTS]
    generate(engine, cut + extended, RANDOM)
    assert _bits(generate(engine, PROMPTS, EACH)) == alone


def test_t05_a_tiny_pool_changes_no_bit(make_rig: Callable[..., Rig]) -> None:
    """Requests wait for blocks, or lose them: no bit differs from a run with plenty."""
    roomy, small = _rig(make_rig, "gqa_9_3"), _rig(make_rig, "gqa_9_3", num_blocks=11)
    expected = _bits(generate(roomy.engine(), PROMPTS, EACH))
    assert _bits(generate(small.engine(), PROMPTS + NOISE, EACH + [RANDOM] * len(NOISE)))[
        : len(PROMPTS)
    ] == (expected)


def test_t05_two_runs_are_equal(rig: Rig) -> None:
    first, second = (_bits(generate(rig.engine(), PROMPTS, EACH)) for _ in range(2))
    assert first == second


def test_without_the_mode_a_seed_still_fixes_the_text(make_rig: Callable[..., Rig]) -> None:
    """B28: not to the bit, but a request's tokens depend on nobody else: the noise is its own."""
    rig = make_rig("gqa_9_3", budgets=(16, 24), sampling=SamplingConfig())
    expected = [generate(rig.engine(), [prompt], RANDOM)[0].tokens for prompt in PROMPTS]
    busy = generate(rig.engine(), NOISE[:3] + PROMPTS, RANDOM)
    assert [answer.tokens for answer in busy[3:]] == expected
    chunked = generate(rig.engine(scheduler={"mode": "fixed", "chunk_size": 5}), PROMPTS, RANDOM)
    assert [answer.tokens for answer in chunked] == expected
