"""`lab suggest`: finds what helps, says when nothing does, and keeps within limits."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxserve import settings
from jaxserve.config import BucketConfig, EngineConfig, SchedulerConfig
from jaxserve.costs import CostModel
from jaxserve.lab import suggest, trace
from jaxserve.lab.suggest import Limits
from tests.lab.rigs import Rig, prompt

SIZES = (8, 16, 24, 32, 48, 64, 128, 256)
MODEL = CostModel(
    SIZES,
    tuple(0.002 + 50e-6 * size for size in SIZES),
    rows=(8, 16, 32, 64),
    sampling={"greedy": (0.0002, 0.0003, 0.0005, 0.0009)},
)
PROGRAMS = [
    {"program": f"backbone[{size}]", "compile_s": 1 + size / 256, "temp": size << 20, "code": 1000}
    for size in SIZES
] + [
    {"program": f"{kind}[{rows}]", "compile_s": 0.5, "temp": 1 << 20, "code": 500}
    for kind in ("head", "greedy")
    for rows in (8, 16, 32, 64)
]
CONFIG = EngineConfig(
    scheduler=SchedulerConfig(token_budget=256, max_seqs=64),
    buckets=BucketConfig(tokens=SIZES, rows=(8, 16, 32, 64)),
)


def run_of(path: Path, load, config: EngineConfig = CONFIG) -> trace.Trace:
    rig = Rig(path, config)
    load(rig)
    found = rig.trace()
    header = trace.Header(
        **{
            name: getattr(found.header, name)
            for name in ("jaxserve_trace", "version", "config", "device", "facts")
        },
        costs=MODEL,
        programs=PROGRAMS,
    )
    return trace.Trace(header, found.steps, found.requests)


def forty_streams(rig: Rig) -> None:
    """Decodes of 40 rows, for which the default has a bucket of 48 only."""
    for i in range(40):
        rig.add(prompt(3, i), 150)
    rig.run()


def full_steps(rig: Rig) -> None:
    """Prompts one after the other, each a whole budget."""
    for i in range(30):
        rig.add(prompt(256, i), 1)
    rig.run()


def test_a_size_that_is_used_all_the_time_gets_a_bucket(tmp_path: Path):
    found = suggest.suggest(run_of(tmp_path / "t", forty_streams), Limits())
    best = found.best
    assert best is not None and best.slack < 1e-9 and 40 in best.tokens
    assert found.gain > 0.05 and not found.default_is_as_good
    assert best.time_waste < 0.01 < found.default.time_waste
    assert best.programs <= found.recorded.programs
    assert found.recorded.tokens == SIZES
    # What it predicts of the recorded set is what the cost model says of the recorded steps.
    steps = run_of(tmp_path / "again", forty_streams).steps
    model = sum(MODEL.program_s(s.bucket) + MODEL.sampling_s("greedy", 64) for s in steps)
    assert found.recorded.seconds == pytest.approx(model, rel=0.02)


def test_the_ladder_only_gets_better_and_tells_what_a_program_buys(tmp_path: Path):
    found = suggest.suggest(run_of(tmp_path / "t", forty_streams), Limits())
    programs = [rung.programs for rung in found.ladder]
    seconds = [rung.seconds for rung in found.ladder]
    assert programs == sorted(set(programs)) and seconds == sorted(set(seconds), reverse=True)
    assert found.best in found.ladder


def test_it_says_when_the_default_is_as_good(tmp_path: Path):
    found = suggest.suggest(run_of(tmp_path / "t", full_steps), Limits())
    assert found.default_is_as_good and abs(found.gain) < suggest.AS_GOOD


def test_limits_are_kept_and_impossible_ones_leave_nothing(tmp_path: Path):
    run = run_of(tmp_path / "t", forty_streams)
    for limits in (Limits(programs=6), Limits(compile_s=9.0), Limits(memory_mib=256.02)):
        found = suggest.suggest(run, limits)
        assert found.best is not None
        assert found.best.programs <= (limits.programs or 99)
        assert found.best.compile_s <= (limits.compile_s or 99)
        assert found.best.memory_mib <= (limits.memory_mib or 999)
    assert suggest.suggest(run, Limits(programs=6)).gain < suggest.suggest(run, Limits()).gain
    assert suggest.suggest(run, Limits(compile_s=1.0)).best is None
    assert suggest.suggest(run, Limits(memory_mib=100)).best is None


def test_the_engine_takes_the_time_that_was_predicted(tmp_path: Path):
    def seconds(batch) -> float:
        return MODEL.program_s(batch.token_bucket) + MODEL.sampling_s("greedy", batch.row_bucket)

    found = suggest.suggest(run_of(tmp_path / "t", forty_streams), Limits())
    assert found.best is not None
    took = []
    for name in ("recorded", "best"):
        made = getattr(found, name)
        config = dataclasses.replace(CONFIG, buckets=BucketConfig(made.tokens, made.rows))
        rig = Rig(tmp_path / name, config, seconds=seconds)
        rig.engine.set_costs(MODEL, follow=False)
        forty_streams(rig)
        took.append(1e-6 * sum(step.device for step in rig.trace().steps))
        assert took[-1] == pytest.approx(made.seconds, rel=0.02)
    assert took[1] < 0.95 * took[0]


def test_without_costs_a_padded_token_counts(tmp_path: Path):
    run = run_of(tmp_path / "t", forty_streams)
    fields = {name: getattr(run.header, name) for name in run.header.__struct_fields__}
    bare = trace.Trace(trace.Header(**fields | {"costs": None}), run.steps, run.requests)
    found = suggest.suggest(bare, Limits())
    assert not found.measured and found.best is not None and 40 in found.best.tokens


def test_the_command(jaxserve, tmp_path: Path):
    path, config = tmp_path / "run.trace", tmp_path / "best.toml"
    rig = Rig(path, CONFIG)
    forty_streams(rig)
    rig.trace()
    ran = jaxserve("lab", "suggest", "--trace", path, "--json", "--write", config)
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert 40 in report["best"]["tokens"] and report["gain"] > 0
    assert list(settings.read(config).buckets.tokens) == report["best"]["tokens"]
    text = jaxserve("lab", "suggest", "--trace", path).out
    assert "an estimate" in text and "less device time than the default" in text
    for bad in (["--max-programs", "0"], ["--trace", tmp_path / "absent"]):
        ran = jaxserve("lab", "suggest", "--trace", path, *bad)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert jaxserve("lab", "suggest", "--trace", path, "--max-programs", 1).code == 1
