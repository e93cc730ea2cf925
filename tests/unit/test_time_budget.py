"""Mode time against every schedule there is: on small cases no deadline is missed that some order
could meet; and the laws of its parts."""

import functools
import itertools
import math
import random
from typing import NamedTuple

import numpy as np
import pytest

from jaxserve.config import (
    BucketConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SloClass,
    SloConfig,
)
from jaxserve.costs import NO_STEP, CostModel
from jaxserve.scheduler import time_budget
from jaxserve.scheduler.time_budget import Decoders, Price, Prompt, StepTime
from tests.lab.rigs import Rig, prompt

UNIT = 1e-3


class Job(NamedTuple):
    """A request of a small case: everything in units of a millisecond, arrived at 0."""

    prompt: int
    outputs: int
    ttft: int
    tpot: int


class Case(NamedTuple):
    jobs: tuple[Job, ...]
    fixed: int  # of a step
    token: int  # of a token of its bucket
    budget: int
    sizes: tuple[int, ...]


def case(seed: int, *, fine: bool = True, tight: bool = False) -> Case:
    """`fine`: every number of tokens has a bucket.  `tight`: TPOT as short as one token's step, in
    place of a step with a token of every job."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 2, 3])
    budget = max(count, rng.choice([2, 3, 4, 6]))  # so that every request has a seat
    fixed, token = rng.choice([0, 1, 2, 3]), rng.choice([1, 1, 2])
    sizes = tuple(range(1, budget + 1)) if fine else tuple(sorted({rng.randint(1, budget), budget}))
    jobs = []
    for _ in range(count):
        length, outputs = rng.randint(1, 5), rng.randint(1, 3)
        least = fixed + token * (1 if tight else count)
        jobs.append(
            Job(length, outputs, rng.randint(length * token, 30), rng.randint(least, least + 8))
        )
    return Case(tuple(jobs), fixed, token, budget, sizes)


def can_be_met(of: Case) -> bool:
    """Whether any sequence of steps meets all deadlines: a search over all of them."""

    def due(job: Job, done: int) -> int:
        return job.ttft + done * job.tpot

    @functools.cache
    def search(now: int, state: tuple[tuple[int, int], ...]) -> bool:
        """`state`: prompt tokens left and outputs done of each job."""
        open_ = [i for i, (_, done) in enumerate(state) if done < of.jobs[i].outputs]
        if not open_:
            return True
        if any(now >= due(of.jobs[i], state[i][1]) for i in open_):
            return False
        choices = [range(state[i][0] + 1) if state[i][0] else range(2) for i in open_]
        for taken in itertools.product(*choices):
            tokens = sum(taken)
            if not 0 < tokens <= of.budget:
                continue
            bucket = next(size for size in of.sizes if size >= tokens)
            end = now + of.fixed + of.token * bucket
            after, good = list(state), True
            for i, n in zip(open_, taken, strict=True):
                left, done = state[i]
                if n and n >= left:  # the whole prompt, or a decode
                    good = good and end <= due(of.jobs[i], done)
                    after[i] = (0, done + 1)
                else:
                    after[i] = (left - n, done)
            if good and search(end, tuple(after)):
                return True
        return False

    return search(0, tuple((job.prompt, 0) for job in of.jobs))


def missed(of: Case, tmp_path) -> list[tuple[int, int]]:
    """(job, output) of every deadline that the engine misses, in virtual time with exact costs."""
    costs = CostModel(
        of.sizes, tuple(UNIT * (of.fixed + of.token * size) + 1e-12 for size in of.sizes)
    )
    classes = {
        f"c{i}": SloClass(ttft_ms=job.ttft + 1e-6, tpot_ms=job.tpot)
        for i, job in enumerate(of.jobs)
    }
    config = EngineConfig(
        model=ModelConfig(max_len=16),
        cache=CacheConfig(block_size=1, num_blocks=64, prefix_caching=False),
        scheduler=SchedulerConfig(
            mode="time",
            token_budget=of.budget,
            max_seqs=len(of.jobs),
            max_partial_prefills=8,
            max_long_partial_prefills=8,
            watermark=0.0,
        ),
        buckets=BucketConfig(tokens=of.sizes),
        runner=RunnerConfig(overlap=False),
        slo=SloConfig(classes=classes, margin=0.0),
    )
    rig = Rig(
        tmp_path / "t",
        config,
        seconds=lambda batch: costs.program_s(batch.token_bucket),
        costs=costs,
    )
    rig.recording.close()
    requests = [
        rig.add(prompt(job.prompt, i), job.outputs, slo_class=f"c{i}")[0]
        for i, job in enumerate(of.jobs)
    ]
    start, found = rig.clock.now, []
    counts = dict.fromkeys(requests, 0)
    while rig.engine.has_work:
        for output in rig.engine.step():
            i = requests.index(output.request)
            due = of.jobs[i].ttft + counts[output.request] * of.jobs[i].tpot
            if rig.clock.now > start + UNIT * due + 1e-6:
                found.append((i, counts[output.request]))
            counts[output.request] += 1
    assert all(counts[r] == job.outputs for r, job in zip(requests, of.jobs, strict=True))
    return found


@pytest.mark.parametrize("group", range(6))
def test_no_deadline_is_missed_that_any_order_could_meet(group: int, tmp_path) -> None:
    met = 0
    for seed in range(60 * group, 60 * (group + 1)):
        of = case(seed)
        if can_be_met(of):
            met += 1
            assert not missed(of, tmp_path), (seed, of)
    assert met >= 30


@pytest.mark.parametrize("kind", [{"fine": False}, {"tight": True}])
def test_coarse_buckets_and_tight_pace_cost_few_cases(kind: dict, tmp_path) -> None:
    """Padding makes a step cost more than its tokens, and a pace that no step of all decodes keeps
    needs steps of some: there the earliest deadline first is not always right."""
    cases = [of for of in (case(seed, **kind) for seed in range(200)) if can_be_met(of)]
    bad = sum(bool(missed(of, tmp_path)) for of in cases)
    assert len(cases) > 100 and bad <= 0.04 * len(cases)


# -- the parts ------------------------------------------------------------------------------------

SIZES = (8, 16, 32, 64)


def price(predict=None) -> Price:
    """2 ms a step and 0.1 ms a token of its bucket."""
    return Price(predict or (lambda s: 2e-3 + 1e-4 * s.bucket), SIZES, (8, 16), "greedy")


def decoders(*due: float, gap: float = math.inf, context: int = 10) -> Decoders:
    rows = len(due)
    return Decoders(np.array(due), np.full(rows, gap), np.full(rows, context, np.int32))


def test_steps_keep_the_pace_while_prompts_are_in_time() -> None:
    rows = decoders(*[1.0] * 4, gap=0.005)
    pace = time_budget.decide(0.0, rows, [Prompt(0.5, 0, 200)], price())
    assert pace == (0.005, ())


def test_a_prompt_that_would_be_late_uses_up_the_lead() -> None:
    rows = decoders(*[0.02] * 4, gap=0.005)
    pace = time_budget.decide(0.0, rows, [Prompt(0.05, 0, 200)], price())
    assert pace == (0.01, ()), "all decodes run, in steps as long as the prompt needs"
    rows = decoders(*[0.009] * 4, gap=0.005)
    pace = time_budget.decide(0.0, rows, [Prompt(0.05, 0, 200)], price())
    assert pace == (0.009, ()), "and no longer than the lead allows"


def test_a_long_prompt_is_hurried_only_where_it_is_late_otherwise() -> None:
    """Its first chunks read less than its last ones.  With steps of 15 ms all of it takes
    0.39 s; if every chunk read as much as the last one, 0.71."""

    def reads(shape):
        return 2e-3 + 1e-4 * shape.bucket + 4e-7 * shape.chunk_pairs

    of, seconds, start = price(reads), 0.0, 0
    load = NO_STEP.with_singles(np.full(4, 10, np.int32))
    while start < 1000:
        tokens = of.most(load, 4, Prompt(math.inf, start, 1000 - start), 15e-3)
        seconds += of.seconds(load.with_chunk(start, tokens), 5)
        start += tokens
    rows = decoders(*[10.0] * 4, gap=15e-3)
    for spare, end in ((1.4, 15e-3), (0.9, 0.9 * seconds)):
        pace = time_budget.decide(0.0, rows, [Prompt(spare * seconds, 0, 1000)], of)
        assert pace.end == pytest.approx(end), seconds


def test_decodes_with_a_lead_wait_for_a_burst() -> None:
    """Two full steps and nothing else make the prompt's deadline."""
    rows = decoders(*[1.0] * 4, gap=0.005)
    pace = time_budget.decide(0.0, rows, [Prompt(0.0169, 0, 128)], price())
    assert pace.held == (0, 1, 2, 3) and pace.end == pytest.approx(0.0169)


def test_who_is_due_before_the_prompt_does_not_wait() -> None:
    rows = decoders(0.01, 1.0, 0.012)
    pace = time_budget.decide(0.0, rows, [Prompt(0.0169, 0, 128)], price())
    assert pace.held == (1,) and pace.end == 0.01


def test_what_is_lost_already_does_not_hold_up_the_rest() -> None:
    late = decoders(-1.0, -1.0, gap=0.004)
    assert time_budget.decide(0.0, late, [], price()).end == 0.004
    assert time_budget.decide(0.0, late, [Prompt(-1.0, 0, 500)], price()) == (0.004, ())
    hopeless = decoders(-1.0, gap=0.001)
    # Where no prompt gets late for it, a step is at most twice one of the decodes alone (2.8 ms).
    for due in (-1.0, 10.0, math.inf):
        assert time_budget.decide(0.0, hopeless, [Prompt(due, 0, 500)], price()).end == 5.6e-3


def test_decodes_take_turns_where_a_step_of_all_would_be_late() -> None:
    """All 16 take 3.6 ms, eight 2.8 ms: those due at 3 ms go first, the others after them."""
    rows = decoders(*[0.003] * 4, *[0.0058] * 12)
    pace = time_budget.decide(0.0, rows, [], price())
    assert pace.end == 0.003 and set(pace.held) <= set(range(4, 16)) and len(pace.held) == 8
    lost = decoders(*[0.003] * 4, *[0.005] * 12)
    assert time_budget.decide(0.0, lost, [], price()).held == ()


def test_two_steps_where_mixing_costs_more_than_both() -> None:
    def dear(shape):
        return 2e-3 + 1e-4 * shape.bucket + (0.05 if shape.singles and shape.chunks else 0.0)

    rows = decoders(*[1.0] * 4, gap=0.2)
    apart = time_budget.decide(0.0, rows, [Prompt(5.0, 0, 64)], price(dear))
    assert apart.held == (0, 1, 2, 3) and apart.end < 0.2
    assert time_budget.decide(0.0, rows, [Prompt(5.0, 0, 64)], price()).held == ()


@pytest.mark.parametrize("seconds", [0.0, 0.0028, 0.003, 0.0052, 0.0084, 1.0])
@pytest.mark.parametrize("pending", [1, 5, 30, 64, 200])
def test_the_most_that_fits_fits_and_no_bucket_more_does(seconds: float, pending: int) -> None:
    load, of = NO_STEP.with_singles(np.full(4, 10, np.int32)), Prompt(1.0, 0, pending)
    found = price().most(load, 4, of, seconds)
    most = min(pending, SIZES[-1] - 4)
    for tokens in range(1, most + 1):
        fits = price().seconds(load.with_chunk(0, tokens), 5) <= seconds
        assert fits == (tokens <= found), (tokens, found)


def test_a_step_is_never_empty_and_aged_prompts_get_a_little() -> None:
    time = StepTime(price(), NO_STEP, 0.0)
    assert time.most(0, 100, 100) == 8
    time.add(0, 8, False)
    assert time.most(8, 92, 92) == 0 and time.least(92) == 8


# -- a burst of long prompts ----------------------------------------------------------------------


def burst(mode: str, tmp_path, *, ttft_ms: float = 2000.0) -> tuple[list[float], list[float]]:
    """Gaps of eight streams while three long prompts come in, and the TTFT of these; ms."""
    sizes = (8, 16, 32, 64, 128, 256, 512)
    costs = CostModel(sizes, tuple(4e-3 + 2e-4 * size for size in sizes), single_context=2e-7)
    config = EngineConfig(
        model=ModelConfig(max_len=4096),
        cache=CacheConfig(block_size=16, num_blocks=2000, prefix_caching=False),
        scheduler=SchedulerConfig(mode=mode, token_budget=512, max_seqs=16, stall_limit=0),
        buckets=BucketConfig(tokens=sizes),
        slo=SloConfig(ttft_ms=ttft_ms, tpot_ms=30.0),
    )
    rig = Rig(
        tmp_path / mode,
        config,
        seconds=lambda b: costs.program_s(b.token_bucket) + 2e-7 * float(b.inputs.kv_lens.sum()),
        max_len=4096,
        costs=costs,
    )
    rig.recording.close()
    streams = [rig.add(prompt(20, i), 300)[0] for i in range(8)]
    times: dict = {}
    sent = math.inf
    while rig.engine.has_work:
        if sent == math.inf and streams[0].num_tokens > 60:
            sent = rig.clock.now
            late = [rig.add(prompt(1500, i), 20)[0] for i in range(3)]
        for output in rig.engine.step():
            times.setdefault(output.request, []).append(rig.clock.now)
    gaps = [1e3 * (b - a) for r in streams for a, b in itertools.pairwise(times[r])]
    return sorted(gaps), [1e3 * (times[r][0] - sent) for r in late]


def test_a_burst_of_long_prompts_breaks_the_token_budget_and_not_the_time_budget(tmp_path) -> None:
    gaps, _ = burst("dynamic", tmp_path)
    assert gaps[int(0.99 * len(gaps))] > 60.0, "a step of the whole budget takes 106 ms"
    gaps, first = burst("time", tmp_path)
    assert gaps[int(0.99 * len(gaps))] <= 30.0
    assert max(first) <= 2000.0


def test_prompts_that_would_be_late_may_use_the_lead_of_the_streams(tmp_path) -> None:
    """The streams ran ahead of 30 ms a token; with a stricter promise they give of that."""
    _, calm = burst("time", tmp_path, ttft_ms=2000.0)
    gaps, first = burst("time", tmp_path, ttft_ms=1000.0)
    assert max(first) <= 1000.0 < max(calm)
    assert max(gaps) > 30.0


def test_without_costs_steps_are_as_large_as_the_token_budget(tmp_path, caplog) -> None:
    config = EngineConfig(
        model=ModelConfig(max_len=512),
        cache=CacheConfig(block_size=16, num_blocks=100),
        scheduler=SchedulerConfig(mode="time", token_budget=64, max_seqs=4),
        slo=SloConfig(tpot_ms=0.001),
    )
    rig = Rig(tmp_path / "t", config)
    rig.recording.close()
    for i in range(3):
        rig.add(prompt(150, i), 5)
    rig.run()
    assert max(record.shape.tokens for record in rig.records) == 64
    assert sum("token budget" in record.message for record in caplog.records) == 1


def test_what_the_time_did_not_allow_is_said(tmp_path) -> None:
    sizes = (8, 16, 32, 64)
    config = EngineConfig(
        model=ModelConfig(max_len=512),
        cache=CacheConfig(block_size=16, num_blocks=100),
        scheduler=SchedulerConfig(mode="time", token_budget=64, max_seqs=4),
        buckets=BucketConfig(tokens=sizes),
        slo=SloConfig(ttft_ms=1e6, tpot_ms=5.0),
    )
    costs = CostModel(sizes, tuple(1e-3 + 1e-4 * size for size in sizes))
    seconds = [costs.program_s(size) for size in sizes]
    rig = Rig(
        tmp_path / "t",
        config,
        seconds=lambda b: seconds[sizes.index(b.token_bucket)],
        costs=costs,
    )
    rig.recording.close()
    rig.add(prompt(5), 60)
    for _ in range(4):
        rig.step()
    rig.add(prompt(300, 1), 5)
    rig.run()
    cut = [record for record in rig.records if record.unused == "time_budget"]
    assert cut and all(record.device_s <= 5e-3 for record in cut)


# -- nobody starves -------------------------------------------------------------------------------

AGING = 10


def steps_of(tmp_path, classes: dict, requests: list[tuple[int, int, str]]) -> list[list[int]]:
    """The steps in which each request had tokens; the first `len(requests) - 1` decode already when
    the last comes.  A step takes 2 ms and 1 ms for 8 tokens of its bucket."""
    sizes = (8, 16, 32, 64)
    costs = CostModel(sizes, tuple(2e-3 + 1e-3 * size / 8 for size in sizes))
    config = EngineConfig(
        model=ModelConfig(max_len=2048),
        cache=CacheConfig(block_size=16, num_blocks=600, prefix_caching=False),
        scheduler=SchedulerConfig(mode="time", token_budget=64, max_seqs=9, aging_steps=AGING),
        buckets=BucketConfig(tokens=sizes),
        runner=RunnerConfig(overlap=False),
        slo=SloConfig(classes=classes, margin=0.0),
    )
    seconds = [costs.program_s(size) for size in sizes]
    rig = Rig(
        tmp_path / "t",
        config,
        seconds=lambda b: seconds[sizes.index(b.token_bucket)],
        costs=costs,
        max_len=2048,
    )
    rig.recording.close()
    added = []
    for length, outputs, name in requests[:-1]:
        added += rig.add(prompt(length, len(added)), outputs, slo_class=name)
    while any(request.num_tokens == request.num_prompt for request in added):
        rig.step()
    length, outputs, name = requests[-1]
    added += rig.add(prompt(length, 99), outputs, slo_class=name)
    found: list[list[int]] = [[] for _ in added]
    step = 0
    while added[-1].num_tokens < length + outputs and rig.engine.has_work:
        before = [request.num_computed for request in added]
        rig.step()
        for i, request in enumerate(added):
            if request.num_computed != before[i]:
                found[i].append(step)
        step += 1
    return found


def test_a_prompt_without_a_deadline_gets_on_beside_decodes_that_leave_no_time(tmp_path) -> None:
    """Eight streams fill the bucket of 8, and 3.5 ms a token leave no time for the next one."""
    classes = {"tight": SloClass(ttft_ms=50.0, tpot_ms=3.5), "none": SloClass()}
    streams = [(4, 400, "tight")] * 8
    *_, late = steps_of(tmp_path, classes, [*streams, (40, 2, "none")])
    gaps = [b - a for a, b in itertools.pairwise([-1, *late])]
    assert max(gaps) <= AGING + 1 and len(late) > 3 and max(gaps) > 3


def test_a_decode_without_a_deadline_gets_on_beside_prompts_that_need_every_step(tmp_path) -> None:
    classes = {"first": SloClass(ttft_ms=166.0), "none": SloClass()}
    stream, late = steps_of(tmp_path, classes, [(4, 400, "none"), (1024, 2, "first")])
    during = [step for step in stream if step <= late[-1]]
    gaps = [b - a for a, b in itertools.pairwise([-1, *during])]
    assert max(gaps) <= AGING + 1 and max(gaps) > 3
