"""Laws of the loop: overlap, late results, ends, samples, faults, determinism, records."""

import dataclasses
import random

import numpy as np
import pytest

from jaxserve.batch.buckets import resolve
from jaxserve.batch.step import Batch, StepResult
from jaxserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from jaxserve.costs import CostModel
from jaxserve.engine import Engine, ModelLimits
from jaxserve.metrics import StepRecord
from jaxserve.request import Output, Request, SamplingParams, Status
from tests.simulation.hash_runner import Alone, HashRunner

VOCAB = 50
EOS = 3


class Rig:
    """An engine over a HashRunner whose batches are kept."""

    def __init__(
        self,
        *,
        blocks: int = 200,
        overlap: bool = True,
        deterministic: bool = False,
        caching: bool = True,
        bad_one_in: int = 0,
        **rules,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(max_len=400),
            cache=CacheConfig(block_size=4, num_blocks=blocks, prefix_caching=caching),
            scheduler=SchedulerConfig(**{"token_budget": 64, "max_seqs": 8, **rules}),
            runner=RunnerConfig(overlap=overlap, deterministic=deterministic),
        )
        self.config = resolve(config, 400, 1)
        seats = self.config.scheduler.max_seqs
        self.runner = HashRunner(blocks, 4, seats, VOCAB, bad_one_in)
        self.batches: list[tuple[Batch, np.ndarray]] = []
        real = self.runner.dispatch

        def dispatch(batch: Batch) -> StepResult:
            self.batches.append((batch, batch.packed.copy()))
            return real(batch)

        self.runner.dispatch = dispatch  # type: ignore[method-assign]
        self.records: list[StepRecord] = []
        limits = ModelLimits(VOCAB, frozenset({EOS}))
        self.engine = Engine(self.config, self.runner, limits, on_step=self.records.append)
        self.bad_one_in = bad_one_in

    def drain(self) -> list[Output]:
        outputs: list[Output] = []
        while self.engine.has_work:
            outputs += self.engine.step()
        assert self.engine.kv.num_used == 0
        assert self.engine.kv.num_available == self.config.cache.num_blocks
        return outputs

    def alone(self, request: Request) -> Alone:
        return Alone(request, VOCAB, self.bad_one_in)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(5 * i + 11 * salt + i * i) % VOCAB for i in range(length)]


def greedy(max_tokens: int = 10, **more) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more}
    )


def answers(requests: list[Request]) -> list[tuple[list[int], str | None]]:
    return [(request.output, request.finish_reason) for request in requests]


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 7])
def test_b39_exact_counts(overlap: bool, max_tokens: int) -> None:
    rig = Rig(overlap=overlap)
    (request,) = rig.engine.add(prompt(9), greedy(max_tokens))
    outputs = rig.drain()
    assert len(request.output) == max_tokens and request.finish_reason == "length"
    assert sum(len(o.tokens) for o in outputs) == max_tokens == rig.engine.stats.output_tokens
    assert rig.engine.stats.dropped_tokens == 0  # length limits are known ahead
    assert [o.finish_reason for o in outputs][-1] == "length"
    # One step for the prompt, then one a token but the last, which needs no KV.
    assert len(rig.records) == max(1, max_tokens)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_b39_an_eos_found_late_costs_one_discarded_token(at: int) -> None:
    (probe,) = Rig().engine.add(prompt(9), greedy(12))
    output = Rig().alone(probe).output
    stop = output[at]
    first = output.index(stop)
    for overlap in (False, True):
        rig = Rig(overlap=overlap)
        (request,) = rig.engine.add(prompt(9), greedy(12, stop_token_ids=(stop,)))
        rig.drain()
        assert request.output == output[: first + 1] and request.finish_reason == "stop"
        assert rig.engine.stats.dropped_tokens == int(overlap and first + 1 < 12)


def test_b42_requests_that_end_in_their_first_step_free_their_seats() -> None:
    rig = Rig()
    long = rig.engine.add(prompt(20), greedy(100))
    for i in range(300):
        rig.engine.add(prompt(1 + i % 7, i), greedy(1))
    rig.drain()
    assert long[0].finish_reason == "length"
    assert len(rig.engine.scheduler._seats) == 8


def test_b11_nothing_comes_out_before_the_prompt_is_complete() -> None:
    rig = Rig(token_budget=8)
    (request,) = rig.engine.add(prompt(40), greedy(3))
    outputs = [rig.engine.step() for _ in range(5)]
    assert not any(outputs) and not request.output
    assert all(output.tokens for output in rig.drain())


# -- overlap --------------------------------------------------------------------------------------


def _mixed(rig: Rig) -> list[Request]:
    requests: list[Request] = []
    for i in range(14):
        sampling = SamplingParams(
            max_tokens=5 + i,
            temperature=0.8 if i % 3 else 0.0,
            presence_penalty=0.5 if i % 4 == 0 else 0.0,
            seed=i,
        )
        requests += rig.engine.add(prompt(3 + 5 * i, i % 3), sampling)
    return requests


@pytest.mark.parametrize("blocks", [30, 200])
def test_overlap_never_changes_tokens(blocks: int) -> None:
    results: list[list[tuple[list[int], str | None]]] = []
    for overlap in (False, True):
        rig = Rig(blocks=blocks, overlap=overlap)
        requests = _mixed(rig)
        rig.drain()
        results.append(answers(requests))
    assert results[0] == results[1]


def test_overlap_dispatches_before_it_reads() -> None:
    calls: list[str] = []
    rig = Rig()
    dispatch, result = rig.runner.dispatch, rig.runner.result
    rig.runner.dispatch = lambda b: (calls.append("dispatch"), dispatch(b))[1]  # type: ignore[method-assign]
    rig.runner.result = lambda h: (calls.append("result"), result(h))[1]  # type: ignore[method-assign]
    rig.engine.add(prompt(5), greedy(4))
    assert rig.engine.step() == []
    rig.drain()
    assert calls == ["dispatch", "dispatch", "result"] + ["dispatch", "result"] * 2 + ["result"]


@pytest.mark.parametrize("when", range(1, 9))
@pytest.mark.parametrize("overlap", [False, True])
def test_b38_a_late_result_is_dropped_exactly_once(when: int, overlap: bool) -> None:
    """Preempted while its step is in flight: same tokens, nothing doubled or lost."""
    rig = Rig(overlap=overlap)
    requests = _mixed(rig)[:6]
    for _ in range(when):
        rig.engine.step()
    scheduler = rig.engine.scheduler
    real = scheduler._take_decodes

    def with_preemptions(draft):
        for request in list(scheduler.running)[::2]:
            scheduler._preempt(draft, request)
        scheduler._take_decodes = real
        return real(draft)

    scheduler._take_decodes = with_preemptions
    rig.drain()
    for request in requests:
        alone = rig.alone(request)
        assert (request.output, request.finish_reason) == (alone.output, alone.reason)
    assert rig.engine.stats.preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_b41_cancel_at_every_moment_frees_everything(overlap: bool) -> None:
    for when in range(12):
        rig = Rig(overlap=overlap, token_budget=16)
        (gone,) = rig.engine.add(prompt(40), greedy(6))
        (stays,) = rig.engine.add(prompt(10, 1), greedy(6))
        for _ in range(when):
            rig.engine.step()
        ended = gone.status is Status.FINISHED
        rig.engine.finish(gone, "abort")
        rig.engine.finish(gone, "stop")
        assert gone.finish_reason == ("length" if ended else "abort")
        assert not gone.num_blocks and gone.seat == -1
        assert not any(output.request is gone for output in rig.drain())
        assert stays.output == rig.alone(stays).output


# -- buffers --------------------------------------------------------------------------------------


def test_t08_b27_arrays_of_a_step_are_fresh_and_frozen() -> None:
    rig = Rig(blocks=40)
    _mixed(rig)
    rig.drain()
    seen: set[int] = set()
    tables = rig.engine.kv.tables
    for batch, copy in rig.batches:
        assert np.array_equal(batch.packed, copy), "edited after dispatch"
        assert not batch.packed.flags.writeable
        assert id(batch.packed) not in seen
        seen.add(id(batch.packed))
        for view in batch.inputs:
            assert np.shares_memory(view, batch.packed) and not np.shares_memory(view, tables)
            with pytest.raises(ValueError):
                view[...] = 0


def test_b15_b17_padding_is_past_the_end() -> None:
    rig = Rig()
    rig.engine.add(prompt(5), greedy(3))
    rig.drain()
    batch = rig.batches[0][0]
    x, slots, seats = batch.inputs, 200 * 4, 8
    assert (batch.num_tokens, batch.token_bucket, batch.row_bucket) == (5, 8, 8)
    assert x.slots[5:].tolist() == [slots] * 3 and x.token_seats[5:].tolist() == [seats] * 3
    assert x.query_starts.tolist() == [0] + [5] * 8 and x.kv_lens.tolist() == [5] + [0] * 7
    assert batch.samples is not None
    assert batch.samples.token_index.tolist() == [4] + [8] * 7
    assert batch.samples.seats.tolist()[1:] == [8] * 7
    assert x.block_tables.shape == (8, 100)


def test_the_sampler_is_the_least_that_serves_every_row() -> None:
    rig = Rig()
    rig.engine.add(prompt(5), greedy(2))
    rig.engine.add(prompt(5, 1), SamplingParams(max_tokens=4))
    rig.engine.add(prompt(5, 2), SamplingParams(max_tokens=6, logit_bias={1: 1.0}))
    rig.drain()
    used = [batch.sampler for batch, _ in rig.batches]
    assert used[0] == "full" and set(used) == {"full"}
    rig.engine.add(prompt(5), greedy(4))
    rig.engine.add(prompt(5, 1), SamplingParams(max_tokens=2, seed=5))
    rig.drain()
    assert [b.sampler for b, _ in rig.batches][len(used) :] == ["random"] * 2 + ["greedy"] * 2
    rig.engine.add(prompt(70, 7), greedy(1))
    rig.drain()
    assert rig.batches[-2][0].sampler == "none"


def test_b59_top_k_is_clamped_and_neutral_values_are_neutral() -> None:
    rig = Rig()
    for i, top_k in enumerate((-1, 0, 1, VOCAB, VOCAB + 1, 10**9)):
        rig.engine.add(prompt(4, i), SamplingParams(max_tokens=1, top_k=top_k))
    rig.engine.add(prompt(4, 9), SamplingParams(max_tokens=1, presence_penalty=1.0))
    rig.drain()
    samples = rig.batches[0][0].samples
    assert samples is not None
    assert samples.top_k.tolist() == [VOCAB, VOCAB, 1] + [VOCAB] * 5
    assert samples.presence.tolist() == [0.0] * 6 + [1.0, 0.0]
    assert (samples.repetition == 1).all() and (samples.bias == 0).all()
    assert (samples.bias_ids >= VOCAB).all() and (samples.stop_ids >= VOCAB).all()


# -- samples --------------------------------------------------------------------------------------


def test_b63_samples_differ_reproduce_and_compute_the_prompt_once() -> None:
    def run(caching: bool) -> tuple[list[Request], Rig]:
        rig = Rig(caching=caching)
        requests = rig.engine.add(prompt(33), SamplingParams(n=4, max_tokens=12, seed=7))
        rig.drain()
        return requests, rig

    first, rig = run(True)
    again, plain = run(False)
    assert answers(first) == answers(again)
    assert len({tuple(request.output) for request in first}) == 4
    assert [request.sample for request in first] == [0, 1, 2, 3]
    assert rig.engine.stats.prefill_tokens == 33 + 3  # the others compute one token each
    assert plain.engine.stats.prefill_tokens == 4 * 33


@pytest.mark.parametrize("when", range(6))
def test_b63_one_cancel_frees_all_and_one_alone_frees_itself(when: int) -> None:
    for cancel_all in (True, False):
        rig = Rig(token_budget=16)
        requests = rig.engine.add(prompt(40), greedy(4, n=3))
        for _ in range(when):
            rig.engine.step()
        for request in requests if cancel_all else requests[:1]:
            rig.engine.finish(request, "abort")
        if cancel_all:
            assert rig.engine.num_waiting == rig.engine.num_running == 0
        rig.drain()
        assert rig.engine.num_waiting == 0
        for request in requests[3 if cancel_all else 1 :]:
            assert request.output == rig.alone(request).output


def test_seeds_without_a_seed_differ_by_request_and_repeat_by_run() -> None:
    def run() -> list[Request]:
        rig = Rig()
        requests = [rig.engine.add(prompt(6), SamplingParams(max_tokens=8))[0] for _ in range(5)]
        rig.drain()
        return requests

    first, again = run(), run()
    assert answers(first) == answers(again)
    assert len({request.seed for request in first}) == 5


# -- logprobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8, 13, 64])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 50])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_b12_prompt_logprobs_over_chunk_borders_hot_and_cold(
    budget: int, length: int, max_tokens: int
) -> None:
    rig = Rig(token_budget=budget)
    for _ in range(2):  # the second time the prompt is cached
        sampling = greedy(max_tokens, prompt_logprobs=2, logprobs=1)
        (request,) = rig.engine.add(prompt(length), sampling)
        outputs = rig.drain()
        scores = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(scores) == 1 and scores[0] is outputs[0].prompt_logprobs
        found = [entry and (entry.logprob, entry.rank) for entry in scores[0]]
        alone = rig.alone(request)
        assert found == alone.prompt_scores
        assert all(len(entry.top) == 2 for entry in scores[0] if entry)
        tokens = [o.logprobs[0] for o in outputs if o.logprobs]
        assert [(e.logprob, e.rank) for e in tokens] == alone.scores
    for batch, _ in rig.batches:
        assert all(len(score.targets) == rig.config.buckets.rows[-1] for score in batch.scores)


@pytest.mark.parametrize("when", range(7))
def test_b12_gathered_scores_are_freed_on_abort(when: int) -> None:
    rig = Rig(token_budget=16)
    (request,) = rig.engine.add(prompt(60), greedy(3, prompt_logprobs=0))
    for _ in range(when):
        rig.engine.step()
    rig.engine.finish(request, "abort")
    rig.drain()
    assert len(rig.engine._prompts) == 0


# -- faults ---------------------------------------------------------------------------------------


def test_a_bad_row_fails_its_request_alone() -> None:
    rig = Rig(bad_one_in=30)
    requests = [rig.engine.add(prompt(5, i), greedy(12))[0] for i in range(20)]
    rig.drain()
    for request in requests:
        alone = rig.alone(request)
        assert (request.output, request.finish_reason) == (alone.output, alone.reason)
    reasons = {request.finish_reason for request in requests}
    assert reasons == {"length", "error"}
    assert all(r.error for r in requests if r.finish_reason == "error")


@pytest.mark.parametrize("where", ["fail_dispatch", "fail_result"])
@pytest.mark.parametrize("when", [0, 1, 4])
def test_a_runner_that_raises_fails_those_with_kv_and_the_engine_lives(
    where: str, when: int
) -> None:
    rig = Rig(max_seqs=3, token_budget=16)
    requests = [rig.engine.add(prompt(20, i), greedy(8))[0] for i in range(6)]
    for _ in range(when):
        rig.engine.step()
    setattr(rig.runner, where, True)
    outputs = rig.drain()
    failed = [request for request in requests if request.finish_reason == "error"]
    assert failed and all("RuntimeError" in str(request.error) for request in failed)
    assert {o.request for o in outputs if o.finish_reason == "error"} == set(failed)
    for request in requests:
        if request not in failed:
            assert request.output == rig.alone(request).output
    assert rig.engine.stats.failed_steps == 1
    (after,) = rig.engine.add(prompt(20, 0), greedy(8))  # its prefix must not be trusted
    rig.drain()
    assert after.output == rig.alone(after).output


# -- prefix cache, determinism, records ------------------------------------------------------------


def test_t14_canaries_never_leak() -> None:
    """Many requests over shared prefixes with secrets of their own get what they get alone."""
    rng = random.Random(5)
    rig = Rig(blocks=60, token_budget=24)
    shared = [prompt(24, salt) for salt in range(3)]
    requests: list[Request] = []
    for _ in range(80):
        secret = [rng.randrange(VOCAB) for _ in range(6)]
        tokens = rng.choice(shared)[: rng.choice([8, 9, 16, 24])] + secret
        requests += rig.engine.add(tokens, greedy(6), salt=rng.choice(["", "tenant"]))
        rig.engine.step()
    rig.drain()
    assert rig.engine.stats.hit_tokens > 300
    for request in requests:
        assert request.output == rig.alone(request).output


def test_b55_resume_hits_are_counted_apart() -> None:
    rig = Rig(blocks=24, max_seqs=6, watermark=0.0)
    rng = random.Random(1)
    for _ in range(8):
        rig.engine.add([rng.randrange(VOCAB) for _ in range(9)], greedy(60))
    rig.drain()
    assert rig.engine.stats.preemptions and rig.engine.stats.resume_hit_tokens
    assert rig.engine.stats.hit_tokens == 0
    assert rig.engine.stats.recomputed_tokens > 0


def test_cached_tokens_are_reported_per_request() -> None:
    rig = Rig()
    (first,) = rig.engine.add(prompt(17), greedy(2))
    rig.drain()
    (second,) = rig.engine.add(prompt(17), greedy(2))
    rig.drain()
    assert (first.num_cached, second.num_cached) == (0, 16)


@pytest.mark.parametrize("neighbours", [0, 3, 12])
@pytest.mark.parametrize("warm", [False, True])
def test_b14_deterministic_chunks_are_canonical_and_never_preempted(
    neighbours: int, warm: bool
) -> None:
    """T05, the host's share: chunk borders of a prompt are the same alone, busy and warm."""
    rig = Rig(deterministic=True, chunk_size=16, token_budget=32, blocks=400)
    if warm:
        rig.engine.add(prompt(55), greedy(1))
        rig.drain()
    for i in range(neighbours):
        rig.engine.add(prompt(7 + 9 * i, i + 1), greedy(9))
        rig.engine.step()
    (request,) = rig.engine.add(prompt(60), greedy(9))
    borders: list[tuple[int, int]] = []
    real = rig.engine.scheduler.schedule

    def spy(begin: float):
        plan = real(begin)
        borders.extend((c.start, c.num_tokens) for c in plan.chunks if c.request is request)
        return plan

    rig.engine.scheduler.schedule = spy  # type: ignore[method-assign]
    rig.drain()
    canonical = [(0, 16), (16, 16), (32, 16), (48, 12)]
    assert borders == (canonical[3:] if warm else canonical)
    assert {batch.token_bucket for batch, _ in rig.batches} == {32}
    assert {batch.sampler for batch, _ in rig.batches} <= {"full", "none"}
    assert rig.engine.stats.preemptions == 0
    assert request.output == rig.alone(request).output


def test_records_add_up() -> None:
    rig = Rig(blocks=40)
    sizes = rig.config.buckets.tokens
    seconds = tuple(0.001 + size * 1e-5 for size in sizes)
    rig.engine.set_costs(CostModel(sizes, seconds, chunk_pair=1e-9), follow=False)
    requests = _mixed(rig)
    rig.drain()
    stats, records = rig.engine.stats, rig.records
    assert stats.steps == len(records) == len(rig.batches)
    assert stats.output_tokens == sum(len(request.output) for request in requests)
    for record, (batch, _) in zip(records, rig.batches, strict=True):
        real = record.decode_tokens + record.prefill_tokens + record.recomputed_tokens
        assert real == batch.num_tokens == record.bucket - record.padded_tokens
        inputs = batch.inputs
        counts = np.diff(inputs.query_starts)
        long = counts > 1
        shape, ends = record.shape, inputs.kv_lens[: len(counts)]
        assert (shape.singles, shape.chunks) == ((counts == 1).sum(), long.sum())
        assert shape.single_context == ends[counts == 1].sum()
        seen = sum(sum(range(e - n + 1, e + 1)) for e, n in zip(ends[long], counts[long]))  # noqa: B905
        assert shape.chunk_pairs == seen
        assert (shape.bucket, shape.tokens) == (record.bucket, batch.num_tokens)
        assert (shape.rows, shape.sampler) == (batch.row_bucket, batch.sampler)
        assert record.predicted_s == pytest.approx(0.001 + record.bucket * 1e-5 + 1e-9 * seen)
        assert 0 <= record.padding_s < record.device_s
        assert (record.padding_s > 0) == (record.padded_tokens > 0)
        assert 0 < record.kv_used <= record.kv_blocks == 40
    assert sum(stats.unused.values()) == sum(stats.buckets.values()) == len(records)
    names = {field.name for field in dataclasses.fields(StepRecord)}
    assert {"waiting", "running", "preemptions", "sampler", "unused"} <= names
