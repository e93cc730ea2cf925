"""How long prompts may hold up the decodes beside them, in mode dynamic."""

import pytest

from jaxserve.costs import CostModel
from jaxserve.metrics import StepRecord
from jaxserve.scheduler import scheduler
from tests.unit.scheduling import asks, drain, make, prompt


def beside_decodes(
    prompts: int,
    length: int,
    *,
    seconds: float = 1e-3,
    costs: bool = True,
    stream: int = 3,
    context: float = 0.0,
    **rules,
) -> list[StepRecord]:
    """Steps, each of at least one decode and one prompt's chunk, after `prompts` of `length`
    came to running streams with prompts of `stream`; a token costs `seconds`, a decode's context
    `context` each, and a step 10 ms beside."""
    engine, _, records = make(token_budget=512, seats=16, blocks=4000, **rules)
    if costs:
        sizes = engine.config.buckets.tokens
        programs = tuple(0.01 + seconds * size for size in sizes)
        model = CostModel(sizes, programs, single_context=context)
        engine.set_costs(model, follow=False)
    streams = [engine.add(prompt(stream, i), asks(200))[0] for i in range(6)]
    while any(not request.output for request in streams) or len(records) < 4:
        engine.step()
    before = len(records)
    for i in range(prompts):
        engine.add(prompt(length, 10 + i), asks(1))
    drain(engine)
    return [r for r in records[before:] if r.decode_tokens and r.prefill_tokens]


@pytest.mark.parametrize("limit", [1.0, 3.0, 6.0, 12.0])
def test_few_prompts_hold_up_no_decode_for_longer_than_the_limit(limit: float) -> None:
    """But for the smallest step with three fifths of the largest one's tokens a second."""
    steps = beside_decodes(2, 1000, stall_limit=limit)
    alone = 0.01 + 8e-3  # six decodes, in the bucket of 8
    seconds = {size: 0.01 + 1e-3 * size for size in (8, 16, 32, 64, 128, 256, 512)}
    rates = {size: (size - 6) / took for size, took in seconds.items()}
    efficient = min(size for size, rate in rates.items() if rate >= 0.6 * rates[512])
    within = max(size for size, took in seconds.items() if took <= limit * alone)
    most = max(efficient, within)
    assert (most == efficient) == (limit < 6.0)
    assert max(r.bucket for r in steps) == most
    full = [r for r in steps if r.bucket == most and not r.padded_tokens]
    assert len(full) >= 7 and all(r.unused == "time_budget" for r in full)


@pytest.mark.parametrize(
    "rules",
    [
        {"stall_limit": 0},
        {"costs": False},
        {"prompts": 5},
        {"length": 1500},  # more than four steps
        {"mode": "fixed", "chunk_size": 256},
    ],
)
def test_the_whole_budget_is_used_where_nobody_set_a_limit_or_many_wait(rules: dict) -> None:
    steps = beside_decodes(**{"prompts": 2, "length": 1000, "stall_limit": 3.0, **rules})
    assert max(r.bucket for r in steps) == 512
    assert steps[0].unused != "time_budget"


def test_one_prompt_is_few_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FEW_BUDGETS", 1)
    steps = beside_decodes(1, 3000, stall_limit=3.0)
    assert max(r.bucket for r in steps) < 512


def test_contexts_beyond_a_window_do_not_lengthen_what_decodes_take_alone() -> None:
    """Six contexts of 600 take 0.36 s where all of it is read, 6 ms in a window of 10."""
    beside = {"length": 1000, "stream": 600, "context": 1e-4, "stall_limit": 3.0}
    whole = beside_decodes(2, **beside)
    assert max(r.bucket for r in whole) == 512
    steps = beside_decodes(2, **beside, windows=(10,))
    predicted = max(r.predicted_s or 0.0 for r in steps)
    assert max(r.bucket for r in steps) < 256 and predicted < 0.2


def test_a_step_that_costs_next_to_nothing_more_is_not_cut() -> None:
    """An accelerator's: 512 tokens take 1.5 times what 8 do."""
    steps = beside_decodes(2, 1000, seconds=1e-5)
    assert steps[0].bucket == 512 and steps[0].unused is None
