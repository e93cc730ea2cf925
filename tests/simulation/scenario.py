"""One seeded scenario: a random engine, random requests, random mishaps, and what must hold.

Everything follows from the seed.  `run(seed)` raises AssertionError with the seed in it.
"""

import dataclasses
import logging
import random
import types

from jaxserve.batch.buckets import resolve
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
from jaxserve.costs import CostModel
from jaxserve.engine import Engine, ModelLimits, QueueFull
from jaxserve.kv.groups import FULL, Windows
from jaxserve.metrics import StepRecord
from jaxserve.request import Output, Request, SamplingParams, Status
from jaxserve.scheduler.plan import Plan
from tests.simulation.hash_runner import Alone, HashRunner

VOCAB = 50
EOS = frozenset({3})
MODEL_LEN = 96


def random_windows(rng: random.Random) -> Windows:
    """Of the groups of layers of a model."""
    if rng.random() < 0.4:
        return FULL
    return tuple(rng.choice([None, 1, 2, 5, 8, 13, 40]) for _ in range(rng.choice([1, 2, 2, 3])))


def random_config(rng: random.Random, groups: int) -> EngineConfig:
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    deterministic = rng.random() < 0.15
    budget = rng.choice([1, 2, 5, 7, 8, 13, 16, 24, 33, 64, 100])
    chunk = rng.choice([1, 3, 4, 8, 16, 32])
    seats = rng.choice([1, 2, 3, 5, 8, 12])
    if deterministic:
        chunk = max(chunk, block_size)
        budget = max(budget, chunk + seats)
    tokens = ()
    if rng.random() < 0.3:
        tokens = tuple(sorted(rng.sample(range(1, 80), 3)))
    max_len = rng.choice([12, 40, 64, MODEL_LEN])
    return EngineConfig(
        model=ModelConfig(max_len=max_len),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=groups * (rng.choice([4, 10, 24, 60, 120, 400]) // block_size + 1),
            prefix_caching=rng.random() < 0.75,
        ),
        scheduler=SchedulerConfig(
            mode=rng.choice(["dynamic", "dynamic", "fixed"]),
            token_budget=budget,
            chunk_size=chunk,
            max_seqs=seats,
            policy=rng.choice(["fcfs", "priority", "round_robin", "shortest_first"]),
            aging_steps=rng.choice([1, 4, 20, 256]),
            max_partial_prefills=rng.choice([1, 2, 8]),
            max_long_partial_prefills=rng.choice([1, 2]),
            long_prefill_threshold=rng.choice([0, 5, 20]),
            watermark=rng.choice([0.0, 0.01, 0.2]),
            reserve_full_prompt=rng.random() < 0.8,
            max_waiting=rng.choice([3, 1000]),
        ),
        buckets=BucketConfig(tokens=tokens),
        runner=RunnerConfig(overlap=rng.random() < 0.7, deterministic=deterministic),
    )


def by_time(config: EngineConfig, rng: random.Random) -> EngineConfig:
    """In mode time, with classes of all kinds of deadlines."""

    def ms() -> float:
        return rng.choice([0.0, 0.5, 2.0, 10.0, 200.0])

    classes = {name: SloClass(ms(), ms()) for name in rng.sample(["a", "b", "c"], 2)}
    return dataclasses.replace(
        config,
        scheduler=dataclasses.replace(config.scheduler, mode="time"),
        slo=SloConfig(ms(), ms(), classes, rng.choice([0.0, 0.1])),
    )


def random_costs(config: EngineConfig, rng: random.Random) -> CostModel:
    sizes, rows = config.buckets.tokens, config.buckets.rows
    fixed, token = rng.choice([0.0, 1e-3, 5e-3]), rng.choice([1e-5, 1e-3])
    return CostModel(
        sizes,
        tuple(fixed + token * size for size in sizes),
        rows=rows,
        sampling={"greedy": tuple(1e-5 * row for row in rows)},
        single_context=rng.choice([0.0, 1e-6]),
        tile_pair=rng.choice([0.0, 1e-8]),
    )


def random_sampling(rng: random.Random) -> SamplingParams:
    def maybe(value: object, neutral: object, chance: float = 0.15) -> object:
        return value if rng.random() < chance else neutral

    max_tokens = rng.choice([0, 1, 2, 5, 12, 30, 10**9])
    values = {
        "max_tokens": max_tokens,
        "temperature": rng.choice([0.0, 0.0, 0.7]),
        "top_k": maybe(5, 0),
        "top_p": maybe(0.9, 1.0),
        "presence_penalty": maybe(0.5, 0.0),
        "repetition_penalty": maybe(1.2, 1.0),
        "logit_bias": maybe({7: 1.5, 2: -3.0}, {}, 0.1),
        "min_tokens": maybe(min(max_tokens, rng.choice([1, 4])), 0),
        "stop_token_ids": maybe((rng.randrange(VOCAB), 11), ()),
        "ignore_eos": rng.random() < 0.3,
        "logprobs": maybe(rng.choice([0, 2, 20]), None),
        "prompt_logprobs": maybe(rng.choice([0, 2]), None),
        "n": rng.choice([2, 3]) if rng.random() < 0.15 else 1,
        "seed": maybe(rng.getrandbits(40), None, 0.5),
    }
    return SamplingParams(**values)  # type: ignore[arg-type]


@dataclasses.dataclass
class Expected:
    request: Request
    alone: Alone
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt_scores: int = 0  # times they were delivered
    ended: str | None = None  # reason seen in an output
    cancelled: bool = False


class Scenario:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.windows = random_windows(rng)
        self.timed = random.Random(-seed - 1)  # draws of its own, so that other modes stay as were
        config = random_config(rng, len(self.windows))
        if not config.runner.deterministic and self.timed.random() < 0.3:
            config = by_time(config, self.timed)
        costs = config.scheduler.mode == "time" and self.timed.random() < 0.9
        if config.scheduler.mode == "dynamic" and self.timed.random() < 0.4:
            costs, limit = True, self.timed.choice([0.0, 1.0, 2.0, 6.0])
            rules = dataclasses.replace(config.scheduler, stall_limit=limit)
            config = dataclasses.replace(config, scheduler=rules)
        self.config = resolve(config, MODEL_LEN, 1, windows=self.windows)
        self.now = 0.0
        self.bad_one_in = rng.choice([0, 0, 0, 40])
        self.faults = rng.random() < 0.15
        self.injected = 0
        cache, rules = self.config.cache, self.config.scheduler
        self.runner = HashRunner(
            cache.num_blocks,
            cache.block_size,
            rules.max_seqs,
            VOCAB,
            self.bad_one_in,
            self.windows,
        )
        self.records: list[StepRecord] = []
        self.engine = Engine(
            self.config,
            self.runner,
            ModelLimits(VOCAB, EOS, self.windows),
            clock=lambda: self.now,
            on_step=self.records.append,
        )
        if costs:
            self.engine.set_costs(random_costs(self.config, self.timed))
        self.scheduler = self.engine.scheduler
        self.schedule = self.scheduler.schedule
        self.scheduler.schedule = types.MethodType(  # type: ignore[method-assign]
            lambda _, begin: self.checked_schedule(begin), self.scheduler
        )
        self.expected: dict[Request, Expected] = {}
        self.prompts = [self._prompt() for _ in range(3)]
        self.steps = 0
        self.waited: dict[Request, int] = {}  # decodes, steps in a row

    def _prompt(self) -> list[int]:
        length = self.rng.choice([1, 2, 5, 8, 16, 17, 31, 40, 70])
        return [self.rng.randrange(VOCAB) for _ in range(length)]

    def add(self) -> None:
        rng = self.rng
        prompt = self._prompt()
        if rng.random() < 0.5:  # shares a prefix
            base = rng.choice(self.prompts)
            prompt = base[: rng.randint(0, len(base))] + prompt
        sampling = random_sampling(rng)
        if self.config.slo.classes:
            named = self.timed.choice(["", *self.config.slo.classes])
            sampling = dataclasses.replace(sampling, slo_class=named)
        waiting, number = self.engine.num_waiting, self.engine._number
        try:
            requests = self.engine.add(
                prompt,
                sampling,
                priority=rng.choice([0, 0, 1, -2]),
                salt=rng.choice(["", "", "a"]),
            )
        except (ValueError, QueueFull):  # all or nothing
            assert (self.engine.num_waiting, self.engine._number) == (waiting, number)
            return
        assert len(requests) == sampling.n
        for request in requests:
            alone = Alone(request, VOCAB, self.bad_one_in, self.windows)
            self.expected[request] = Expected(request, alone)

    def checked_schedule(self, begin: float) -> Plan:
        """Schedules, and checks the laws of a plan."""
        scheduler, rules = self.scheduler, self.config.scheduler
        decoding = {
            r for r in scheduler.running if r in scheduler._decoding and r.num_tokens < r.max_total
        }
        partial = [r for r in scheduler.running if r.num_computed < r.num_prompt]
        plan = self.schedule(begin)
        planned = {chunk.request for chunk in plan.chunks} | set(plan.decodes.requests)
        rows = len(plan.chunks) + plan.decode_tokens
        assert len(planned) == rows, "a request has two rows"
        timed = rules.mode == "time"
        # A decode never stalls: it is in the step or it was preempted; in mode time it waits at
        # most `aging_steps` steps in a row, and never while nothing runs.
        for request in decoding - planned - set(plan.preempted):
            self.waited[request] = self.waited.get(request, 0) + 1
            assert timed and planned and self.waited[request] <= rules.aging_steps
        for request in planned:
            self.waited.pop(request, None)
        prefill = sum(c.num_tokens for c in plan.chunks)
        assert plan.num_tokens == prefill + plan.decode_tokens <= rules.token_budget
        assert plan.num_tokens <= plan.bucket or not rows
        assert len(scheduler.running) <= rules.max_seqs
        assert (plan.unused is None) == (plan.num_tokens == rules.token_budget), plan.unused
        if plan.unused == "time_budget" and not timed:
            assert rules.stall_limit and plan.decode_tokens and plan.chunks
        still = [r for r in partial if r.status is Status.RUNNING]
        if still and not timed:
            assert plan.chunks, "prefills stall"
        bound = rules.aging_steps + rules.max_seqs + 1
        for request in still:
            assert scheduler._step - request.last_step <= bound, "a prefill is passed over"
        if self.config.runner.deterministic:
            assert not plan.preempted
            for chunk in plan.chunks:
                if chunk.start < chunk.request.num_prompt:
                    end = chunk.start + chunk.num_tokens
                    assert chunk.start % rules.chunk_size == 0
                    assert end == chunk.request.num_prompt or end % rules.chunk_size == 0
        return plan

    def check_books(self) -> None:
        running = self.scheduler.running
        self.engine.kv.check(running)
        self.runner.scribble(self.engine.kv._pool._blank)
        seats = [r.seat for r in running]
        assert len(set(seats)) == len(seats) and all(s >= 0 for s in seats)
        assert all(r.status is Status.RUNNING for r in running)
        for request in self.expected:
            if request.status is not Status.RUNNING:
                assert not request.num_blocks and request.seat == -1 and not request.num_in_flight
        waiting = sum(r.status is Status.WAITING for r in self.expected)
        assert waiting == self.engine.num_waiting

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            seen = self.expected[output.request]
            assert not seen.cancelled and seen.ended is None, "output after the end"
            if output.finish_reason is None:
                assert output.tokens
            first = not seen.tokens
            at = len(seen.tokens)
            seen.tokens.extend(output.tokens)
            assert seen.tokens == seen.alone.output[: len(seen.tokens)], "not as alone"
            self._check_logprobs(output, seen, at, first)
            if output.finish_reason:
                seen.ended = output.finish_reason
                assert output.finish_reason == output.request.finish_reason

    def _check_logprobs(self, output: Output, seen: Expected, at: int, first: bool) -> None:
        asked = output.request.sampling
        if asked.logprobs is not None and output.tokens:
            assert output.logprobs is not None
            (entry,) = output.logprobs
            assert (entry.logprob, entry.rank) == seen.alone.scores[at]
            assert entry.token == output.tokens[0] and len(entry.top) == asked.logprobs
        else:
            assert output.logprobs is None
        wanted = asked.prompt_logprobs is not None and not output.request.sample
        if wanted and first and output.finish_reason != "error":
            found = [e and (e.logprob, e.rank) for e in output.prompt_logprobs or ()]
            assert found == seen.alone.prompt_scores
        else:
            assert output.prompt_logprobs is None

    def mishap(self) -> None:
        rng = self.rng
        if self.expected and rng.random() < 0.04:
            request = rng.choice(list(self.expected))
            if request.status is not Status.FINISHED:
                self.expected[request].cancelled = True
            reason = rng.choice(["abort", "stop"])
            self.engine.finish(request, reason)
            self.engine.finish(request, "abort")
            assert not request.num_blocks
        if self.faults and rng.random() < 0.03:
            self.injected += 1
            if rng.random() < 0.5:
                self.runner.fail_dispatch = True
            else:
                self.runner.fail_result = True

    def run(self) -> int:
        rng = self.rng
        arrivals = rng.randint(1, 14)
        rate = rng.choice([0.1, 0.5, 1.0])
        limit = 20_000
        while arrivals or self.engine.has_work:
            while arrivals and rng.random() < rate:
                self.add()
                arrivals -= 1
            self.mishap()
            self.now += self.timed.choice([0.0, 0.001, 0.02])
            self.take(self.engine.step())
            self.check_books()
            self.steps += 1
            assert self.steps < limit, "no end"
        self.check_end()
        return self.steps

    def check_end(self) -> None:
        kv = self.engine.kv
        assert kv.num_used == 0 and kv.num_available == kv.num_blocks
        assert not len(self.engine._prompts) and not self.engine._followers
        failed = self.engine.stats.failed_steps
        assert failed <= self.injected, "a step failed that nobody made fail"
        for seen in self.expected.values():
            assert seen.request.status is Status.FINISHED
            if seen.cancelled:
                assert seen.ended is None
                continue
            if seen.ended == "error" and failed and seen.request.error != _BAD:
                continue
            assert (seen.tokens, seen.ended) == (seen.alone.output, seen.alone.reason)
            assert seen.request.num_preempted <= 2 + seen.request.max_total.bit_length()
        stats = self.engine.stats
        if not failed:
            delivered = sum(len(seen.tokens) for seen in self.expected.values())
            assert stats.output_tokens == delivered


_BAD = "the model's logits were not finite"


def run(seed: int) -> int:
    """Runs the scenario of `seed`; returns its number of steps."""
    logging.getLogger("jaxserve.engine").disabled = True  # raised on purpose here
    scenario = None
    try:
        scenario = Scenario(seed)
        return scenario.run()
    except Exception as error:
        config = scenario.config if scenario else None
        windows = scenario.windows if scenario else None
        raise AssertionError(
            f"scenario seed={seed} failed: {error!r}; windows={windows} config={config}"
        ) from error
    finally:
        logging.getLogger("jaxserve.engine").disabled = False
