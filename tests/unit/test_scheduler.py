"""Laws of the scheduler, with a runner that answers hashes of what it sees."""

import dataclasses
import math
import time

import numpy as np
import pytest

from jaxserve.costs import CostModel
from jaxserve.engine import Engine, ModelLimits, QueueFull
from jaxserve.request import Request, SamplingParams, SeatProgress, Status
from jaxserve.scheduler import policy
from jaxserve.scheduler.plan import Draft, Plan
from tests.simulation.hash_runner import Alone
from tests.unit.scheduling import VOCAB, asks, drain, make, prompt


def first_steps(engine: Engine, requests: list[Request], most: int = 50_000) -> dict[Request, int]:
    """The step in which each request got its first token."""
    seen: dict[Request, int] = {}
    for step in range(most):
        for output in engine.step():
            seen.setdefault(output.request, step)
        if all(request in seen for request in requests):
            return seen
    raise AssertionError("somebody starves")


# -- admission ------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 5, 10])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 20, 39, 40, 41])
@pytest.mark.parametrize("max_tokens", [0, 1, 30, 10**9])
def test_b29_refused_at_submit_or_ends_alone(blocks: int, length: int, max_tokens: int) -> None:
    """T09: whatever is accepted ends, alone, within a bounded number of steps."""
    engine, _, _ = make(blocks=blocks)
    if length > 4 * blocks:
        with pytest.raises(ValueError, match=r"KV pool holds|num_blocks"):
            engine.add(prompt(length), asks(max_tokens))
        assert not engine.has_work
        return
    (request,) = engine.add(prompt(length), asks(max_tokens))
    drain(engine, most=4 * blocks + 10)
    assert request.finish_reason == "length"
    assert len(request.tokens) == min(length + max_tokens, 4 * blocks + 1)
    assert engine.kv.num_used == 0


def test_b29_short_ones_run_beside_a_refused_one() -> None:
    engine, _, _ = make(blocks=10)
    with pytest.raises(ValueError):
        engine.add(prompt(41), asks())
    requests = [engine.add(prompt(5, i), asks())[0] for i in range(4)]
    assert set(drain(engine)) == set(requests)


def test_b31_the_last_request_outgrows_the_pool() -> None:
    engine, _, _ = make(blocks=4)
    (request,) = engine.add(prompt(6), asks(1000))
    drain(engine, most=30)
    assert (request.finish_reason, len(request.tokens)) == ("length", 17)
    assert engine.add(prompt(6), asks(2)) and drain(engine)


def test_b78_length_rule() -> None:
    engine, _, _ = make(max_len=40)
    for length, max_tokens in ((40, 1), (41, 0), (0, 5), (45, 5)):
        with pytest.raises(ValueError):
            engine.add(prompt(length), asks(max_tokens))
    for length, max_tokens, total in ((39, 10**9, 40), (40, 0, 40), (39, 1, 40), (1, 1, 2)):
        (request,) = engine.add(prompt(length), asks(max_tokens))
        drain(engine)
        assert len(request.tokens) == total and request.finish_reason == "length"


def test_b43_add_is_all_or_nothing() -> None:
    engine, _, _ = make(max_waiting=3)
    with pytest.raises(QueueFull):
        engine.add(prompt(4), asks(n=4))
    for bad in ([], [-1], [VOCAB], [True], [1.0], ["a"]):
        with pytest.raises(ValueError):
            engine.add(bad, asks(n=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        engine.add(prompt(4), asks(logit_bias={VOCAB: 1.0}))
    with pytest.raises(ValueError):
        engine.add(prompt(4), asks(stop_token_ids=(VOCAB,)))
    assert not engine.has_work and not engine.num_waiting
    assert len(engine.add(prompt(4), asks(n=3))) == 3


@pytest.mark.parametrize(
    ("feature", "sampling"),
    [
        ("random", {"temperature": 1.0}),
        ("penalties", {"min_tokens": 1}),
        ("logprobs", {"prompt_logprobs": 0}),
    ],
)
def test_a_feature_that_is_off_is_refused(feature: str, sampling: dict) -> None:
    engine, runner, _ = make()
    off = dataclasses.replace(engine.config.sampling, **{feature: False})
    config = dataclasses.replace(engine.config, sampling=off)
    engine = Engine(config, runner, ModelLimits(VOCAB, frozenset()))
    with pytest.raises(ValueError, match=f"sampling.{feature}"):
        engine.add(prompt(4), asks(**sampling))


# -- thrash ---------------------------------------------------------------------------------------


def test_b34_flood_of_long_prompts_never_thrashes() -> None:
    """Pool for 2.5 requests, many long ones: steps within a small factor of one after another."""
    length, output, count = 160, 80, 30

    def steps(serial: bool) -> tuple[int, list[Request], Engine]:
        engine, _, records = make(blocks=150, token_budget=32, prefix_caching=False)
        preempt = engine.scheduler._preempt

        def beyond_its_promise(draft: Draft, request: Request) -> None:
            assert request.num_blocks >= request.reserved
            preempt(draft, request)

        engine.scheduler._preempt = beyond_its_promise  # type: ignore[method-assign]
        requests: list[Request] = []
        for i in range(count):
            requests += engine.add(prompt(length, i), asks(output))
            if serial:
                drain(engine)
        drain(engine)
        assert all(len(r.output) == output for r in requests)
        return len(records), requests, engine

    serial, _, _ = steps(True)
    flood, requests, engine = steps(False)
    assert flood < serial  # batching wins in spite of preemptions
    bound = 2 + math.log2(output / 4)
    assert max(r.num_preempted for r in requests) <= bound
    computed = engine.stats.prefill_tokens + engine.stats.decode_tokens
    assert engine.stats.recomputed_tokens < 0.5 * computed


def test_b34_four_long_ones_in_a_pool_for_two_and_a_half() -> None:
    engine, _, records = make(blocks=25, block_size=4, token_budget=16, prefix_caching=False)
    requests = [engine.add(prompt(20, i), asks(20))[0] for i in range(4)]
    tokens = drain(engine)
    assert len(records) <= 4 * (2 + 20) * 2
    assert max(r.num_preempted for r in requests) <= 2 + math.log2(20 / 4)
    for request in requests:
        assert tokens[request] == Alone(request, VOCAB, 0).output


@pytest.mark.parametrize("reserve", [True, False])
def test_t12_preemptions_per_request_are_bounded(reserve: bool) -> None:
    engine, _, _ = make(
        blocks=30, seats=12, reserve_full_prompt=reserve, watermark=0.0, prefix_caching=False
    )
    requests = [engine.add(prompt(3 + i % 9, i), asks(90))[0] for i in range(40)]
    tokens = drain(engine)
    assert engine.stats.preemptions > 5, "the test forces none"
    for request in requests:
        assert request.num_preempted <= 2 + math.log2(90 / 4)
        assert tokens[request] == Alone(request, VOCAB, 0).output


def test_b34_admission_backs_off_twice_as_long_after_each_preemption() -> None:
    """Until somebody ends; a request that fits at once waits all the same."""
    engine, _, _ = make(blocks=40, watermark=0.0, prefix_caching=False, token_budget=32)
    scheduler = engine.scheduler
    for i in range(60):
        engine.add(prompt(2, i), asks(400))
    backoff, closed_until, admitted_at, pauses = 1, 0, [], []
    for step in range(1, 400):
        ended = [r for r in scheduler.running if r.num_tokens >= r.max_total]
        others = bool(scheduler.running)
        plan = scheduler.schedule()
        if ended or not plan.num_tokens:
            break
        if plan.admitted and others:
            admitted_at.append(step)
            assert step >= closed_until
        if plan.preempted:
            pauses.append(backoff)
            closed_until, backoff = step + backoff, min(2 * backoff, 32)
        rows = plan.decode_tokens + sum(chunk.samples for chunk in plan.chunks)
        scheduler.update(plan, np.zeros(rows, np.int32), np.zeros(rows, np.bool_))
    assert pauses[:6] == [1, 2, 4, 8, 16, 32]
    assert len(admitted_at) >= 3  # it does admit between the pauses


def test_b38_a_chunk_from_before_a_preemption_is_dropped_after_the_request_came_back() -> None:
    """However late its result is: the engine of today reads one step late, the scheduler relies on
    the epoch alone."""
    found = 0
    for blocks in range(4, 12):
        for delay in range(1, 12):
            found += _preempted_behind_its_last_chunk(blocks, delay)
    assert found


def _preempted_behind_its_last_chunk(blocks: int, delay: int) -> bool:
    engine, _, _ = make(
        blocks=blocks,
        token_budget=9,
        watermark=0.0,
        reserve_full_prompt=False,
        prefix_caching=False,
        seats=2,
    )
    scheduler = engine.scheduler

    def land(plan: Plan) -> None:
        rows = plan.decode_tokens + sum(chunk.samples for chunk in plan.chunks)
        scheduler.update(plan, np.zeros(rows, np.int32), np.zeros(rows, np.bool_))

    (old,) = engine.add(prompt(5), asks(4 * blocks - 5))
    for _ in range(delay):
        land(scheduler.schedule())
    if old.status is not Status.RUNNING or 12 > 4 * blocks - 4:
        return False
    (late,) = engine.add(prompt(12, 1), asks(4), priority=1)
    land(scheduler.schedule())
    last = scheduler.schedule()
    if not any(chunk.request is late and chunk.samples for chunk in last.chunks):
        return False
    if late not in scheduler.schedule().preempted:
        return False
    scheduler.finish(old, "stop")
    again = scheduler.schedule()
    assert late in again.admitted and late.status is Status.RUNNING
    land(last)
    assert late.output == []
    return True


def test_victim_is_least_important_then_cheapest_to_recompute() -> None:
    def running(number: int, computed: int, remaining: int, priority: int = 0) -> Request:
        request = Request(number, [0] * computed, computed, SamplingParams(), priority=priority)
        engine_seats = policy_seats(computed)
        request.seat, request.seats, request.max_total = 0, engine_seats, computed + remaining + 1
        return request

    cheap, costly = running(1, 10, 100), running(2, 1000, 100)
    assert policy.victim([costly, cheap]) is cheap
    near, far = running(3, 100, 1), running(4, 100, 500)
    assert policy.victim([near, far]) is far
    humble = running(5, 1000, 1, priority=5)
    assert policy.victim([cheap, humble, far]) is humble
    older, younger = running(6, 50, 50), running(7, 50, 50)
    assert policy.victim([older, younger]) is younger


def policy_seats(computed: int) -> SeatProgress:
    seats = SeatProgress(1)
    seats.computed[0] = computed
    return seats


# -- fairness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fcfs", "priority", "round_robin", "shortest_first"])
def test_b35_short_prompts_pass_a_long_one_and_it_never_stalls(name: str) -> None:
    """T11: shorts' first token within a bounded number of steps; the long one at most doubles."""
    rules = {"policy": name, "token_budget": 32, "long_prefill_threshold": 40, "seats": 32}

    def long_alone() -> int:
        engine, _, records = make(blocks=1000, **rules)
        (request,) = engine.add(prompt(1500), asks(1))
        drain(engine)
        return len(records)

    alone = long_alone()
    engine, _, _ = make(blocks=1000, **rules)
    (long,) = engine.add(prompt(1500), asks(1))
    (second,) = engine.add(prompt(1500, 5), asks(1))
    ages: dict[Request, int] = {}
    seen: dict[Request, int] = {}
    step = 0
    while long not in seen:
        if step % 2 == 0:
            ages[engine.add(prompt(8, step), asks(2))[0]] = step
        for output in engine.step():
            seen.setdefault(output.request, step)
        step += 1
    waits = [seen[r] - ages[r] for r in ages if r in seen]
    assert max(waits) <= 6 and len(waits) > 20
    assert seen[long] <= 2 * alone + 2
    drain(engine)
    assert second.finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "aging", "least", "most"),
    [("fcfs", 256, 46, 48), ("fcfs", 10, 10, 12), ("shortest_first", 256, 1, 2)]
    + [("round_robin", 256, 1, 2), ("priority", 10, 10, 12)],
)
def test_a_short_prompt_behind_a_long_one_in_mode_fixed(
    name: str, aging: int, least: int, most: int
) -> None:
    """One prompt prefills at a time, so the policy alone decides whether a short one waits for the
    47 chunks of the one that came before it; aging bounds the wait."""
    engine, _, _ = make(
        blocks=1000, mode="fixed", policy=name, aging_steps=aging, token_budget=40, chunk_size=32
    )
    engine.add(prompt(1500), asks(1))
    engine.step()
    (short,) = engine.add(prompt(8, 1), asks(2))
    steps = 0
    while not short.output:
        engine.step()
        steps += 1
    assert least <= steps - 1 <= most  # a result arrives a step late


@pytest.mark.parametrize("name", ["fcfs", "priority", "round_robin", "shortest_first"])
@pytest.mark.parametrize("aging", [3, 20])
def test_nobody_is_passed_over_for_longer_than_aging(name: str, aging: int) -> None:
    """A request at a disadvantage against an endless stream of favoured ones."""
    engine, _, _ = make(policy=name, aging_steps=aging, seats=2, token_budget=16, max_len=200)
    for i in range(2):
        engine.add(prompt(6, i), asks(4))
    engine.step()
    (victim,) = engine.add(prompt(30, 9), asks(4), priority=9)
    arrived = 1
    later: list[Request] = []
    step = arrived
    while victim.status is Status.WAITING:
        later += engine.add(prompt(4, step), asks(4), priority=-1)
        engine.step()
        step += 1
        assert step < 40 * aging
    passed = [r for r in later if r.status is not Status.WAITING]
    # After `aging` steps nobody later is admitted before it; two seats, four tokens each.
    assert step - arrived <= aging + 12 and len(passed) <= aging + 2


@pytest.mark.parametrize(("partial", "long"), [(3, 1), (5, 2), (1, 1)])
def test_prompts_in_the_middle_of_their_prefill_are_limited(partial: int, long: int) -> None:
    """Taking turns, everybody would begin at once."""
    engine, _, _ = make(
        policy="round_robin",
        token_budget=8,
        seats=8,
        max_partial_prefills=partial,
        max_long_partial_prefills=long,
        long_prefill_threshold=50,
    )
    for i in range(12):
        engine.add(prompt(60 if i % 2 else 40, i), asks(1))
    most = most_long = 0
    while engine.has_work:
        engine.step()
        begun = [r for r in engine.scheduler.running if 0 < r.num_computed < r.num_prompt]
        most = max(most, len(begun))
        most_long = max(most_long, sum(r.num_prompt == 60 for r in begun))
    assert (most, most_long) == (partial, min(partial, long))


def test_a_long_prompt_begins_in_the_step_in_which_the_one_before_it_ends() -> None:
    """Ten prompts of two steps and a bit each: no step but the last has room left."""
    engine, _, records = make(token_budget=16, seats=12, blocks=400, long_prefill_threshold=8)
    for i in range(10):
        engine.add(prompt(37, i), asks(1))
    drain(engine)
    chunks = [r.prefill_tokens for r in records]
    assert sum(chunks) == 370
    assert all(r.decode_tokens + r.prefill_tokens == 16 for r in records[:23])


def test_the_watermark_keeps_blocks_for_those_that_run() -> None:
    """Admission beside others leaves them; alone, a request may have the whole pool."""
    engine, _, _ = make(blocks=20, watermark=0.5, prefix_caching=False)
    first, second = (engine.add(prompt(19, i), asks(1))[0] for i in range(2))
    third = engine.add(prompt(3, 2), asks(1))[0]
    engine.scheduler.schedule()
    # 5 blocks each, 10 to be left: the second fits exactly, the third does not.
    assert (first.status, second.status) == (Status.RUNNING, Status.RUNNING)
    assert third.status is Status.WAITING
    engine, _, _ = make(blocks=20, watermark=0.5)
    (whole,) = engine.add(prompt(79), asks(1))
    drain(engine)
    assert whole.finish_reason == "length"


def test_round_robin_takes_turns_and_priority_goes_first() -> None:
    def order(name: str, priorities: tuple[int, ...]) -> list[int]:
        engine, _, _ = make(
            policy=name, token_budget=8, mode="fixed", chunk_size=8, long_prefill_threshold=100
        )
        served: list[int] = []
        real = engine.scheduler.schedule

        def spy(begin: float):
            plan = real(begin)
            served.extend(chunk.request.number for chunk in plan.chunks)
            return plan

        engine.scheduler.schedule = spy  # type: ignore[method-assign]
        for i, priority in enumerate(priorities):
            engine.add(prompt(24, i), asks(0), priority=priority)
        drain(engine)
        return served

    assert order("fcfs", (0, 0, 0)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert order("priority", (2, 1, 0)) == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert order("round_robin", (0, 0, 0)) == [0, 1, 2] * 3


def test_shortest_first() -> None:
    engine, _, _ = make(policy="shortest_first", seats=1, token_budget=64)
    sizes = [30, 9, 20, 3]
    requests = [engine.add(prompt(size, size), asks(1))[0] for size in sizes]
    seen = first_steps(engine, requests)
    assert sorted(requests, key=seen.__getitem__) == sorted(requests, key=lambda r: r.num_prompt)


# -- modes, budget, snap ---------------------------------------------------------------------------


def test_fixed_mode_has_equal_chunks_one_a_step_beside_all_decodes() -> None:
    engine, _, records = make(mode="fixed", chunk_size=16, token_budget=32, seats=8)
    for i in range(6):
        engine.add(prompt(50, i), asks(30))
    drain(engine)
    chunks = [r.prefill_tokens for r in records if r.prefill_tokens]
    assert set(chunks) == {16, 2} and chunks.count(16) == 18
    assert any(r.decode_tokens and r.prefill_tokens for r in records)


@pytest.mark.parametrize("budget", [7, 16, 33, 100])
def test_the_largest_bucket_is_the_budget_and_full_steps_have_no_padding(budget: int) -> None:
    engine, _, records = make(token_budget=budget, seats=4)
    assert engine.config.buckets.tokens[-1] == budget
    engine.add(prompt(350), asks(1))
    drain(engine)
    full = [r for r in records if r.unused is None]
    assert len(full) >= 350 // budget and all(r.padded_tokens == 0 for r in full)


def test_unused_budget_has_its_reason() -> None:
    reasons: set[str | None] = set()

    def run(prompts: list[int], **rules) -> list[str | None]:
        engine, _, records = make(**rules)
        for i, size in enumerate(prompts):
            engine.add(prompt(size, i), asks(6))
        drain(engine)
        reasons.update(r.unused for r in records)
        return [r.unused for r in records]

    assert run([5])[0] == "no_work"
    assert "max_seqs" in run([5] * 4, seats=2)
    assert "kv" in run([20] * 4, blocks=8)
    assert "policy" in run([60] * 3, mode="fixed", chunk_size=8, token_budget=64)
    assert run([640])[0] is None
    assert "snap" in run([300], token_budget=512)
    assert "indivisible" in run(
        [32] * 6, deterministic=True, chunk_size=32, token_budget=40, seats=8
    )
    assert reasons >= {"no_work", "max_seqs", "kv", "policy", None, "snap", "indivisible"}


def test_snap_follows_the_measured_costs() -> None:
    def buckets(costs: dict[int, float]) -> list[int]:
        engine, _, records = make(token_budget=512, seats=8)
        sizes = (8, 16, 32, 64, 128, 256, 512)
        seconds = tuple(costs.get(size, float(size)) for size in sizes)
        engine.set_costs(CostModel(sizes, seconds), follow=False)
        engine.add(prompt(300), asks(1))
        drain(engine)
        return [r.bucket for r in records]

    assert buckets({}) == [256, 32, 16]
    assert buckets({64: 33.0}) == [256, 64]
    assert buckets({512: 257.0}) == [512]  # as good as free: pad


# -- speed ----------------------------------------------------------------------------------------


def _step_seconds(engine: Engine, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - began) / steps


def test_a_long_queue_costs_nothing() -> None:
    def timed(waiting: int) -> float:
        engine, _, _ = make(blocks=60, seats=4, max_len=200)
        for i in range(4):
            engine.add(prompt(8, i), asks(180))
        for _ in range(10):
            engine.step()
        queued = [engine.add([1, 2, 3], asks(4))[0] for _ in range(waiting)]
        for request in queued[::2]:
            engine.finish(request, "abort")
        return min(_step_seconds(engine, 20) for _ in range(4))

    assert timed(20_000) < 2.5 * timed(10)


def test_cancelled_waiting_requests_do_not_pile_up() -> None:
    engine, _, _ = make(seats=1)
    engine.add(prompt(5), asks(2000))
    engine.step()
    for i in range(2000):
        (request,) = engine.add([i % VOCAB], asks())
        engine.finish(request, "abort")
    queue = engine.scheduler._short
    assert len(queue) == 0 and len(queue._heap) < 200 and len(queue._oldest) < 200
