"""Sampling options through the whole engine: exact, and of one request alone."""

import dataclasses
from collections.abc import Callable

import pytest

from jaxserve.config import SamplingConfig
from jaxserve.request import SamplingParams
from tests.equivalence.rig import GREEDY, Rig, generate
from tests.reference import tiny

PROMPTS = [tiny.make_prompt(length, 700 + length) for length in (4, 3, 5, 2)]
RANDOM = SamplingParams(temperature=1.0, seed=1, max_tokens=16, ignore_eos=True)
PENALISED = dataclasses.replace(
    RANDOM, presence_penalty=1.5, frequency_penalty=0.8, repetition_penalty=1.4
)


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("gqa_9_3", budgets=(16, 24), sampling=SamplingConfig())


@pytest.mark.parametrize("place", [1, 4, 7])
def test_min_tokens_is_exact(rig: Rig, place: int) -> None:
    """A stop id is possible from the token after the first `min_tokens` on, not before."""
    prompt = PROMPTS[0]
    whole = rig.reference.greedy(prompt, 12)
    assert whole[place] not in whole[:place], "choose a prompt whose continuation does not repeat"
    early = dataclasses.replace(GREEDY, stop_token_ids=(whole[place],), min_tokens=place)
    late = dataclasses.replace(early, min_tokens=place + 1)
    stopped, suppressed = generate(rig.engine(), [prompt] * 2, [early, late])
    assert stopped.tokens == whole[: place + 1] and stopped.finish_reason == "stop"
    assert suppressed.tokens[:place] == whole[:place]
    assert suppressed.tokens[place] != whole[place]


def test_a_bias_ends_with_its_request(rig: Rig) -> None:
    """The next request in the seat has none, also beside one that has."""
    biased = dataclasses.replace(GREEDY, logit_bias={9: 100.0}, logprobs=None)
    engine = rig.engine()
    (first,) = generate(engine, PROMPTS[:1], biased)
    assert set(first.tokens) == {9}
    plain, second = generate(engine, PROMPTS[1:3], [GREEDY, biased])
    rig.check([plain])
    assert set(second.tokens) == {9}


def test_penalties_count_the_own_tokens_only(rig: Rig) -> None:
    """Seats that others used before, requests admitted in one step: as on an engine alone."""
    alone = [generate(rig.engine(), [prompt], PENALISED)[0].tokens for prompt in PROMPTS]
    plain = [generate(rig.engine(), [prompt], RANDOM)[0].tokens for prompt in PROMPTS]
    assert alone != plain
    engine = rig.engine()
    for _ in range(2):
        assert [answer.tokens for answer in generate(engine, PROMPTS, PENALISED)] == alone
    mixed = generate(engine, PROMPTS, [RANDOM, PENALISED, RANDOM, PENALISED])
    expected = [plain[0], alone[1], plain[2], alone[3]]
    assert [answer.tokens for answer in mixed] == expected


def test_every_bit_of_a_seed_counts(rig: Rig) -> None:
    seeds = (1, 2, 1 + 2**32, 1 + 2**63, -1)
    answers = generate(
        rig.engine(),
        [PROMPTS[0]] * len(seeds),
        [dataclasses.replace(RANDOM, seed=seed) for seed in seeds],
    )
    assert len({tuple(answer.tokens) for answer in answers}) == len(seeds)


def test_b67_logprobs_describe_the_raw_model(rig: Rig) -> None:
    """Temperature, filters, penalties and bias do not change them."""
    odd = dataclasses.replace(
        PENALISED, temperature=2.0, top_k=9, top_p=0.9, logit_bias={5: 3.0}, logprobs=5
    )
    (answer,) = generate(rig.engine(), PROMPTS[:1], odd)
    logprobs = rig.reference.dense.logprobs([*PROMPTS[0], *answer.tokens])
    for entry, expected in zip(answer.logprobs, logprobs[len(PROMPTS[0]) - 1 :], strict=False):
        assert abs(entry.logprob - expected[entry.token]) < 1e-4
        assert entry.rank == 1 + sum(expected > expected[entry.token])
