"""T01, B01, B02, B46: however a prompt is cut, whoever runs beside it, whatever is cached, and with
or without overlap, the answer is that of full attention without a cache."""

from collections.abc import Callable

import pytest

from tests.equivalence.rig import BLOCK, GREEDY, MAX_LEN, SCORED, Rig, generate
from tests.reference import tiny

LONG = 5 * BLOCK + 3
PROMPTS = [
    tiny.make_prompt(length, 100 + length)
    for length in (LONG, 1, BLOCK - 1, BLOCK, BLOCK + 1, 8 * BLOCK)
]
CHUNKS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 13, MAX_LEN)
BUDGETS = (7, 13, 33, MAX_LEN)  # each one a bucket


@pytest.fixture(scope="module", params=["gqa_9_3", "all_biases", "rope_llama3"])
def rig(request: pytest.FixtureRequest, make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(request.param)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_t01_equal_chunks(rig: Rig, chunk: int, overlap: bool) -> None:
    engine = rig.engine(
        scheduler={"mode": "fixed", "chunk_size": chunk}, runner={"overlap": overlap}
    )
    alone = generate(engine, PROMPTS[:1], SCORED)
    busy = generate(engine, PROMPTS, SCORED)  # scored prompts take no prefix hit
    warm = generate(engine, PROMPTS, GREEDY)
    rig.check(alone + busy + warm)
    assert all(answer.request.num_cached == 0 for answer in alone + busy)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_t01_dynamic_budgets(make_rig: Callable[..., Rig], budget: int, overlap: bool) -> None:
    rig = make_rig("all_biases", budgets=BUDGETS)
    engine = rig.engine(scheduler={"token_budget": budget}, runner={"overlap": overlap})
    rig.check(generate(engine, PROMPTS, SCORED))
    rig.check(generate(engine, PROMPTS, GREEDY))


def test_b46_cached_prompts_still_compute_their_last_token(rig: Rig) -> None:
    """The same prompts three times; a hit covers every full block before the last token."""
    engine = rig.engine()
    for turn in range(3):
        answers = generate(engine, PROMPTS)
        rig.check(answers)
        for answer in answers:
            last = answer.request.num_prompt - 1
            assert answer.request.num_cached == (last // BLOCK * BLOCK if turn else 0)


def test_b46_a_shared_prefix_is_used_and_changes_nothing(rig: Rig) -> None:
    engine = rig.engine()
    first = PROMPTS[-1]
    rig.check(generate(engine, [first]))
    for shared in (1, BLOCK - 1, BLOCK, 3 * BLOCK + 5, len(first)):
        prompt = [*first[:shared], *tiny.make_prompt(9, shared)]
        (answer,) = generate(engine, [prompt])
        rig.check([answer])
        assert answer.request.num_cached == shared // BLOCK * BLOCK


def test_scores_are_the_same_with_a_warm_cache(rig: Rig) -> None:
    engine = rig.engine(scheduler={"mode": "fixed", "chunk_size": 13})
    cold = generate(engine, PROMPTS, SCORED)
    warm = generate(engine, PROMPTS, SCORED)
    rig.check(cold + warm)
    assert [answer.bits()[2] for answer in cold] == [answer.bits()[2] for answer in warm]
