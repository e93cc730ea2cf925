"""The trace holds what happened, whole and small, and no more than was seen is claimed."""

import gzip
import random
from pathlib import Path

import pytest

from jaxserve.batch.buckets import resolve
from jaxserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxserve.lab import trace
from jaxserve.lab.prefixes import Prefixes
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler import snap
from tests.lab.rigs import Rig, prompt


def config(*, blocks: int = 200, overlap: bool = True, caching: bool = True, **rules):
    return EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=blocks, prefix_caching=caching),
        scheduler=SchedulerConfig(**{"token_budget": 64, "max_seqs": 8, **rules}),
        runner=RunnerConfig(overlap=overlap),
    )


def busy(path: Path, **options) -> tuple[Rig, trace.Trace]:
    """Prompts of all lengths, shared prefixes, cancels, preemptions."""
    rig, rng = Rig(path, config(**options)), random.Random(1)
    requests = []
    for i in range(40):
        shared = prompt(24) if i % 3 == 0 else []
        requests += rig.add(shared + prompt(rng.randint(1, 90), i), rng.randint(0, 30))
        for _ in range(rng.randint(0, 3)):
            rig.step()
        if i % 9 == 0:
            rig.engine.finish(rng.choice(requests), "abort")
    rig.run()
    return rig, rig.trace()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_agrees_with_the_engine(overlap: bool, tmp_path: Path):
    rig, found = busy(tmp_path / "t", overlap=overlap, blocks=60)
    stats, steps = rig.engine.stats, found.steps
    assert len(steps) == stats.steps == len(rig.records)
    assert sum(s.decodes for s in steps) == stats.decode_tokens
    assert sum(s.prefill for s in steps) == stats.prefill_tokens + stats.recomputed_tokens
    assert sum(s.output for s in steps) == stats.output_tokens
    assert sum(len(s.preempted) for s in steps) == stats.preemptions > 0
    assert [s.bucket for s in steps] == [r.bucket for r in rig.records]
    assert all(s.late == 0 for s in steps)
    assert all(s.kv_used <= s.kv_live + 8 * 30 for s in steps)
    rows = found.requests
    assert [row.number for row in rows] == list(range(40))
    assert sum(row.output for row in rows) == stats.output_tokens
    assert sum(count for row in rows for _, count in row.runs) == stats.output_tokens
    assert sum(row.computed for row in rows) == sum(s.prefill for s in steps)
    assert {row.reason for row in rows} == {"length", "abort"}
    for row in rows:
        brought = [s for first, count in row.runs for s in range(first, first + count)]
        assert brought == sorted(set(brought)) and all(s < len(steps) for s in brought)
        ended = row.ended
        assert ended is not None and ended >= row.arrived
    times = [step.at for step in steps]
    assert times == sorted(times)
    virtual = sum(round(1e6 * (0.002 + 20e-6 * s.bucket)) for s in steps)
    assert sum(s.device for s in steps) == virtual


def test_blocks_of_every_group_of_layers_belong_to_somebody(tmp_path: Path):
    """Or the doctor would find blocks of nobody in a model with windows."""
    rig = Rig(tmp_path / "t", config(blocks=400), windows=(None, 16, 16))
    for i in range(12):
        rig.add(prompt(20 + 7 * i, i), 40)
    rig.run()
    steps = rig.trace().steps
    beyond = [s.kv_used - s.kv_live for s in steps[-len(steps) // 4 :]]
    assert min(beyond) <= 0 and max(s.kv_used for s in steps) > 100


def test_the_cut_of_every_step_is_the_snapping_function_s(tmp_path: Path):
    rig, found = busy(tmp_path / "t")
    cuts = 0
    for step in found.steps:
        again = snap.tokens_to_cut(
            step.tokens + step.cut, step.last_chunk, step.decodes, rig.engine.scheduler.costs
        )
        assert again == step.cut
        cuts += step.cut > 0
    assert cuts > 3


def test_a_trace_is_small(tmp_path: Path):
    rig = Rig(tmp_path / "t", config(blocks=4000, max_seqs=64, token_budget=256), max_len=4000)
    for i in range(64):
        rig.add(prompt(50 + i, i), 800)
    rig.run()
    found = rig.trace()
    assert len(found.steps) > 800
    assert (tmp_path / "t").stat().st_size / len(found.steps) < 60


def test_a_killed_run_leaves_a_trace_up_to_the_last_flush(tmp_path: Path):
    rig = Rig(tmp_path / "t", config())
    rig.add(prompt(20), 700)
    rig.run()
    data = (tmp_path / "t").read_bytes()  # not closed: what a killed process leaves
    killed = tmp_path / "killed"
    for size in (len(data), len(data) - 7):
        killed.write_bytes(data[:size])
        found = trace.load(killed)
        assert len(found.steps) >= 256
        assert found.header.device == "virtual"


@pytest.mark.parametrize(
    "data", [b"", b"text", gzip.compress(b'{"a": 1}\n', mtime=0), gzip.compress(b"[]\n", mtime=0)]
)
def test_what_is_no_trace_is_refused_by_name(data: bytes, tmp_path: Path):
    path = tmp_path / "no-trace"
    path.write_bytes(data)
    with pytest.raises(trace.TraceError, match="no-trace"):
        trace.load(path)
    with pytest.raises(trace.TraceError, match="absent"):
        trace.load(tmp_path / "absent")


def test_a_prefix_computed_twice_at_the_same_time_is_counted_as_that(tmp_path: Path):
    rig = Rig(tmp_path / "t", config(token_budget=64))
    for i in range(4):
        rig.add(prompt(40) + prompt(5, i), 4)
    rig.run()
    found = rig.trace()
    assert [row.missed for row in found.requests][0] == (0, 0, 0)
    lost = sum(row.missed[0] for row in found.requests)
    cached = sum(row.cached for row in found.requests)
    assert lost > 0 and lost + cached == 3 * 40
    assert all(row.missed[1:] == (0, 0) for row in found.requests)


def test_a_prefix_that_was_evicted_is_counted_as_that(tmp_path: Path):
    rig = Rig(tmp_path / "t", config(blocks=16))
    rig.add(prompt(40), 2)
    rig.run()
    rig.add(prompt(55, 9), 2)  # takes nearly every block
    rig.run()
    rig.add(prompt(40) + [1, 2, 3], 2)
    rig.run()
    last = rig.trace().requests[-1]
    assert last.missed[0] == last.missed[2] == 0
    assert last.missed[1] > 0 and last.missed[1] + last.cached == 40


def test_requests_that_have_not_ended_are_in_a_closed_trace(tmp_path: Path):
    rig = Rig(tmp_path / "t", config())
    rig.add(prompt(20), 50)
    for _ in range(5):
        rig.step()
    (row,) = rig.trace().requests
    assert (row.ended, row.reason) == (None, None) and row.output == 3
    assert rig.engine.observer is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_knows_nothing_of_results_that_were_under_way_when_it_was_planned(overlap: bool):
    def request(number: int) -> Request:
        made = Request(number, prompt(41), 41, SamplingParams())
        made.digests = [bytes([block]) for block in range(10)]
        return made

    for later in (1, 2):
        prefixes = Prefixes(resolve(config(overlap=overlap), 1000, 1))
        first = request(0)
        assert prefixes.admitted(first, 0) == (0, 0, 0)
        prefixes.computed(first, 0, 41, 0)
        known = later > 1 or not overlap
        expected = (0, 40, 0) if known else (40, 0, 0)
        assert prefixes.admitted(request(1), later) == expected
