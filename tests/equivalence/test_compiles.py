"""T07, B22: after warm-up nothing compiles, whatever the requests ask."""

import random
from collections.abc import Callable

import pytest

from jaxserve.config import SamplingConfig
from jaxserve.request import Request, SamplingParams
from tests.equivalence.rig import MAX_LEN, Answer, Rig, drain
from tests.reference import tiny

BUDGETS = (8, 16, 33)
NUM_REQUESTS = 1000  # what a small server sees in an hour


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("untied", budgets=BUDGETS, num_blocks=30, sampling=SamplingConfig())


def _random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """Any mixture of options, each one often neutral."""

    def maybe(neutral, *others):
        return neutral if rng.random() < 0.6 else rng.choice(others)

    length = rng.choice((1, 2, 7, 8, 9, 16, 30, 61, MAX_LEN - 1))
    max_tokens = rng.choice((1, 1, 2, 3, 9, 20))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice((0.0, 1e-5, 0.3, 1.0, 5.0)),
        top_k=maybe(0, -1, 1, 7, 10**9),
        top_p=maybe(1.0, 0.0, 0.5, 0.99),
        min_p=maybe(0.0, 0.1, 1.0),
        presence_penalty=maybe(0.0, -1.0, 2.0),
        frequency_penalty=maybe(0.0, 0.7),
        repetition_penalty=maybe(1.0, 0.5, 1.8),
        logit_bias=maybe({}, {3: 5.0}, {token: -100.0 for token in range(40)}),
        min_tokens=maybe(0, 1, max_tokens),
        stop_token_ids=maybe((), (5,), tuple(range(16))),
        ignore_eos=maybe(True, False),
        logprobs=maybe(None, 0, 1, 20),
        prompt_logprobs=maybe(None, 0, 20),
        n=maybe(1, 2, 3),
        seed=maybe(None, 0, -1, 2**64 - 1),
    )
    return tiny.make_prompt(length, rng.randrange(50)), sampling


def test_t07_nothing_compiles_after_warm_up(rig: Rig) -> None:
    """And every declared program is used: what no traffic reaches is not declared."""
    engine = rig.engine()
    programs = {program.spec.name for program in rig.runner.manifest}
    rng = random.Random(7)
    rig.runner.compiles.reset()
    for program in rig.runner.manifest:
        program.uses = 0
    answers: dict[Request, Answer] = {}
    for _ in range(NUM_REQUESTS):
        prompt, sampling = _random_request(rng)
        for request in engine.add(prompt, sampling, salt=rng.choice(("", "other"))):
            answers[request] = Answer(request)
        drain(engine, answers, steps=rng.choice((0, 0, 1, 3, 40)))
        if rng.random() < 0.05:
            engine.finish(rng.choice(list(answers)), "abort")
    drain(engine, answers)
    assert rig.runner.compiles_after_warmup == 0
    assert {program.spec.name for program in rig.runner.manifest if program.uses} == programs
    assert engine.stats.failed_steps == 0
    aborted = [a for a in answers.values() if a.request.finish_reason == "abort"]
    assert len(aborted) < len(answers) / 5
    for answer in answers.values():
        assert answer.request.finish_reason in ("stop", "length", "abort")
        assert all(0 <= token < tiny.VOCAB for token in answer.tokens)
