"""`lab simulate`: the engine's own rules in virtual time, on costs that are known exactly."""

import dataclasses
import json
import types
from pathlib import Path

import pytest

from jaxserve.batch.buckets import resolve
from jaxserve.batch.builder import BatchBuilder
from jaxserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxserve.costs import CostModel
from jaxserve.engine import Engine
from jaxserve.kv.groups import Windows
from jaxserve.lab import arrivals, cost_table, simulate, subject
from jaxserve.lab.arrivals import Arrival
from jaxserve.lab.virtual import ShapeBuilder
from jaxserve.offline.workload import LATE_AFTER
from tests.cli.test_bench import lines, write
from tests.lab.rigs import Rig, prompt, shape_of_batch

SIZES = (8, 16, 32, 64, 128)
MODEL = CostModel(
    SIZES,
    tuple(0.004 + 1e-4 * size for size in SIZES),
    rows=(8, 16),
    sampling={"greedy": (0.001, 0.002), "random": (0.003, 0.004)},
    single=1e-5,
    single_context=1e-6,
    chunk=2e-4,
    chunk_pair=1e-7,
)


def config(**more) -> EngineConfig:
    rules = {"token_budget": 128, "max_seqs": 16, **more.pop("rules", {})}
    cache = {"block_size": 8, "num_blocks": 1000, "prefix_caching": False, **more.pop("cache", {})}
    sections = {"scheduler": SchedulerConfig(**rules), "cache": CacheConfig(**cache)}
    return resolve(EngineConfig(**sections, **more), 1000, 1)


def test_one_request_takes_what_its_steps_take():
    model = dataclasses.replace(MODEL, host=0.0005, host_row=1e-4)
    played = simulate.play(config(), model, [Arrival(0.0, 192, 3)])
    first = model.program_s(128) + 2e-4 + 1e-7 * (128 * 129 // 2)
    pairs = 64 * 128 + 64 * 65 // 2
    second = model.program_s(64) + 0.001 + 2e-4 + 1e-7 * pairs
    decode = model.program_s(8) + 0.001 + 1e-5 + 1e-6 * 193
    (times,) = played.replay.times
    host = 0.0005 + 1e-4  # of the first step; later ones are dispatched while the device works
    assert times[0] == pytest.approx(host + first + second)
    assert times[1] - times[0] == pytest.approx(decode)
    assert times[2] - times[1] == pytest.approx(decode + 1e-6)


def test_without_overlap_the_host_is_waited_for():
    model = dataclasses.replace(MODEL, host=0.003)
    load = [Arrival(0.0, 8, 20)]
    ends = {
        overlap: simulate.play(config(runner=RunnerConfig(overlap=overlap)), model, load).replay.end
        for overlap in (True, False)
    }
    assert ends[False] - ends[True] == pytest.approx(19 * 0.003, rel=0.01)


@pytest.mark.parametrize("windows", [(None,), (None, 40, 40)])
@pytest.mark.parametrize("sampler", ["greedy", "random"])
def test_a_step_without_arrays_has_the_shape_of_the_arrays_of_its_plan(
    monkeypatch, sampler: str, windows: Windows
):
    seen, builders = [], []

    def make(*of):
        builders.append((BatchBuilder(*of), ShapeBuilder(*of)))
        return types.SimpleNamespace(build=build)

    def build(plan):
        full, without = (builder.build(plan) for builder in builders[0])
        seen.append(shape_of_batch(full, windows))
        assert full.shape == without.shape == seen[-1]
        assert (full.sampler, full.num_samples) == (without.sampler, without.num_samples)
        return without

    monkeypatch.setattr(simulate, "ShapeBuilder", make)
    drawn = arrivals.generated(
        60, 100.0, arrivals.lengths("1..300", 900), arrivals.lengths("1..40", 900), burst=5
    )
    played = simulate.play(
        config(rules={"max_seqs": 7}), MODEL, drawn, sampler=sampler, windows=windows
    )
    assert seen == [step.shape for step in played.steps]
    assert any(shape.chunks > 1 for shape in seen) and any(shape.singles > 5 for shape in seen)
    assert {shape.sampler for shape in seen} == {"none", sampler}
    assert [s.device_s for s in played.steps] == pytest.approx(
        [s.predicted_s for s in played.steps]
    )


def test_a_recorded_run_is_replayed_step_by_step(tmp_path: Path):
    settings = config(rules={"max_seqs": 4}, cache={"prefix_caching": True})
    rig = Rig(tmp_path / "t", settings, seconds=lambda b: MODEL.predict(b.shape))
    rig.engine.set_costs(MODEL, follow=False)
    rig.add(prompt(64), 1)
    rig.run()
    for number in range(12):
        due = 101.0 + 0.03 * number + 0.2 * (number > 8)
        while rig.clock.now < due and rig.engine.has_work:
            rig.step()
        rig.clock.now = max(rig.clock.now, due)
        rig.add(prompt(64) + prompt(30 + 11 * number, number + 1), 5 + number)
    rig.run()
    trace = rig.trace()
    trace.requests[:] = [row for row in trace.requests if row.prompt > 64]
    offered = arrivals.of_trace(trace)
    assert {arrival.shared for arrival in offered} == {64}
    host = dataclasses.replace(MODEL, host=1e-4)
    played = simulate.play(subject.resolved(settings, subject.Facts(1000, 1.0)), host, offered)
    found, real = played.replay, trace.steps[1:]
    assert len(played.steps) == pytest.approx(len(real), abs=1)
    assert sum(s.device_s for s in played.steps) == pytest.approx(
        sum(s.device for s in real) / 1e6, rel=0.01
    )
    first = min(row.arrived for row in trace.requests)
    took = (max(row.ended or 0 for row in trace.requests) - first) / 1e6
    assert found.end == pytest.approx(took, rel=0.01)
    assert played.steps[0].hit_tokens == 64


def test_late_requests_come_when_all_others_have_their_tokens():
    load = [Arrival(0.0, 20, 60), Arrival(0.0, 30, 90), Arrival(0.0, 400, 2, is_late=True)]
    played = simulate.play(config(), MODEL, load)
    late_at = played.replay.arrived
    assert late_at == max(times[LATE_AFTER - 1] for times in played.replay.times[:2])
    assert played.requests[2].arrival == late_at < played.replay.times[2][0]
    report = simulate.report(played, None, None)
    assert report["stall"]["largest_gap_ms"] > 2 * report["stall"]["undisturbed_gap_ms"]


def test_a_full_queue_refuses_and_what_is_refused_is_not_good():
    load = [Arrival(0.0, 100, 10)] * 30
    played = simulate.play(config(rules={"max_waiting": 6}), MODEL, load)
    report = simulate.report(played, 1e6, None)
    assert report["requests"] == 30 and report["refused"] == 24 == 30 - len(played.served)
    assert report["goodput"]["share"] == pytest.approx(6 / 30)


def test_arrivals_wait_for_their_time_and_for_the_step_in_which_they_come():
    played = simulate.play(config(), MODEL, [Arrival(0.0, 128, 3), Arrival(0.005, 8, 1)])
    idle = simulate.play(config(), MODEL, [Arrival(0.0, 8, 1), Arrival(7.5, 8, 1)])
    assert played.requests[1].arrival == 0.005
    assert played.requests[1].admitted > 0.005
    assert idle.replay.times[1][0] - 7.5 == pytest.approx(idle.replay.times[0][0])


def test_a_pool_too_small_preempts_and_says_so():
    load = [Arrival(0.0, 60, 100)] * 8
    played = simulate.play(config(cache={"num_blocks": 80}), MODEL, load)
    report = simulate.report(played, None, None)
    assert report["preemptions"] > 0 and 0.9 < report["kv"]["max"] <= 1.0
    assert all(len(times) == 100 for times in played.replay.times)


def test_a_sampler_costs_what_its_program_costs():
    load = [Arrival(0.0, 8, 50)]
    greedy, random = (
        simulate.play(config(), MODEL, load, sampler=kind).replay.end
        for kind in ("greedy", "random")
    )
    assert random - greedy == pytest.approx(50 * 0.002)


def test_drawn_loads_have_the_rate_and_the_lengths_that_were_asked_for():
    median = arrivals.lengths("1000/3000", 8000)
    load = arrivals.generated(4000, 50.0, median, arrivals.lengths("10..20", 8000), seed=3)
    assert load == arrivals.generated(4000, 50.0, median, arrivals.lengths("10..20", 8000), seed=3)
    assert load[0].at == 0.0 and load[-1].at == pytest.approx(80, rel=0.1)
    sizes = sorted(arrival.prompt for arrival in load)
    assert sizes[2000] == pytest.approx(1000, rel=0.1) and sizes[3600] == pytest.approx(3000, 0.1)
    assert {arrival.output for arrival in load} == set(range(10, 21))
    bursts = arrivals.generated(4000, 50.0, median, median, burst=40, seed=3)
    assert len({arrival.at for arrival in bursts}) == 100
    assert bursts[-1].at == pytest.approx(80, rel=0.4)
    assert [a.prompt for a in bursts] == [a.prompt for a in load]
    for text in ("", "0", "5..3", "9000", "3/3", "a", "1.5", "-1"):
        with pytest.raises(ValueError, match="write 512"):
            arrivals.lengths(text, 8000)


def test_prompts_share_what_is_shared_and_nothing_else():
    load = [Arrival(0.0, 40, 1, shared) for shared in (0, 0, 16, 16, 24)]
    made = list(arrivals.prompts(load, 1000))
    assert [len(ids) for ids in made] == [40] * 5
    assert made[2][:16] == made[3][:16] == made[4][:16]
    assert len({ids[:8] for ids in made[:3]}) == 3 and len({ids[:24] for ids in made}) == 5


def test_the_simulated_engine_is_the_production_engine():
    made = []

    def make(*args, **options):
        made.append(Engine(*args, **options))
        return made[-1]

    simulate.play(config(), MODEL, [Arrival(0.0, 8, 1)], make_engine=make)
    assert len(made) == 1 and simulate.play.__kwdefaults__["make_engine"] is Engine


def test_costs_of_a_warm_up_are_fitted_to_the_steps_of_the_run(tmp_path: Path):
    """The warm-up says half of what programs take and nothing of attention."""
    warm = CostModel(SIZES, tuple(x / 2 for x in MODEL.program), rows=(8, 16))
    rig = Rig(tmp_path / "t", config(), costs=warm, seconds=lambda b: MODEL.predict(b.shape))
    for number in range(40):
        rig.add(prompt(13 + 9 * number, number), 10 + number)
        if number % 3 == 0:
            rig.step()
    rig.run()
    trace = rig.trace()
    found = subject.of_trace(trace).model
    assert found.tokens == SIZES and found.host > 0
    played = simulate.play(config(), MODEL, arrivals.of_trace(trace))
    predicted = [found.predict(step.shape) for step in played.steps]
    off = [abs(p / s.device_s - 1) for p, s in zip(predicted, played.steps, strict=True)]
    assert sorted(off)[int(0.9 * len(off))] < 0.05
    assert sum(predicted) == pytest.approx(sum(s.device_s for s in played.steps), rel=0.02)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "run.trace"
    settings = dataclasses.replace(config(), runner=RunnerConfig())
    costs = dataclasses.replace(MODEL, host=1e-4)
    rig = Rig(path, settings, costs=costs, seconds=lambda b: MODEL.predict(b.shape))
    for number in range(6):
        rig.add(prompt(50 + number, number), 20)
    rig.run()
    rig.trace()
    return path


def test_the_command_replays_a_trace_and_other_loads_on_its_costs(
    jaxserve, recorded: Path, tmp_path: Path
):
    ran = jaxserve("lab", "simulate", "--trace", recorded, "--json", "--tpot-slo", 50)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["simulated"] and found["requests"] == 6 and found["steps"] > 20
    assert found["costs"].startswith("run.trace") and found["goodput"]["share"] == 1.0
    slower = ["--set", "scheduler.max_seqs=1"]
    ran = jaxserve("lab", "simulate", "--trace", recorded, "--json", *slower)
    assert json.loads(ran.out)["wall_s"] > 2 * found["wall_s"]

    load = write(tmp_path / "w.jsonl", lines(5, max_tokens=9))
    ran = jaxserve("lab", "simulate", "--workload", load, "--costs", recorded, "--json")
    assert json.loads(ran.out)["requests"] == 5
    words = ["--rate", 40, "--requests", 50, "--prompt-tokens", "20..90", "--output-tokens", 12]
    ran = jaxserve("lab", "simulate", *words, "--costs", recorded, "--ttft-slo", 100)
    assert "50 requests in" in ran.out and "goodput at TTFT 100 ms" in ran.out


def test_the_command_takes_a_cost_table(jaxserve, tmp_path: Path):
    table = cost_table.CostTable(
        source="made up",
        device="an abacus",
        model="none",
        costs=MODEL,
        facts={"max_len": 500, "kv_token_bytes": 1000, "kv_gib": 0.001},
    )
    path = tmp_path / "costs.json"
    cost_table.save(path, table)
    words = ["--rate", 40, "--requests", 50, "--prompt-tokens", 100, "--json"]
    ran = jaxserve("lab", "simulate", *words, "--costs", path, "--set", "scheduler.token_budget=64")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["budget"] == 64 and found["costs"] == "costs.json, an abacus"
    assert found["kv"]["max"] > 0.5  # 1073 tokens
    by_name = [*words, "--costs", "a100-llama3-8b", "--scheduler", "prefill-first"]
    found = json.loads(jaxserve("lab", "simulate", *by_name).out)
    assert found["scheduler"] == "prefill-first" and "A100" in found["costs"]
    ran = jaxserve("lab", "simulate", *words, "--costs", "abacus")
    assert ran.code == 2 and "'abacus': no such file; tables here: a100-llama3-8b" in ran.err


def test_the_buckets_are_those_of_the_start_that_a_table_was_measured_with(
    jaxserve, tmp_path: Path
):
    facts = {"max_len": 500, "kv_token_bytes": 1000, "key": {"buckets": [[1, 20, 64], [1, 8]]}}
    table = cost_table.CostTable(
        source="made up", device="an abacus", model="none", costs=MODEL, facts=facts
    )
    cost_table.save(path := tmp_path / "costs.json", table)
    assert subject.read_costs(path).single
    words = ["--rate", 40, "--requests", 9, "--prompt-tokens", 100, "--json", "--costs", path]
    ran = jaxserve("lab", "simulate", *words, "--set", "scheduler.token_budget=64")
    assert set(json.loads(ran.out)["bucket_steps"]) <= {"1", "20", "64"}, ran.err
    named = ["--set", "scheduler.token_budget=64", "--set", "buckets.tokens=[64]"]
    assert set(json.loads(jaxserve("lab", "simulate", *words, *named).out)["bucket_steps"]) == {
        "64"
    }


def test_the_command_estimates_a_chip_by_its_data_sheet(jaxserve):
    words = ["lab", "simulate", "--rate", 5, "--requests", 4, "--json", "--output-tokens", 100]
    words += ["--config", "configs/gpu-h200-llama3.1-8b.toml", "--chip", "h200"]
    ran = jaxserve(*words, "--efficiency", 0.5, "--host-ms", 1)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    # 15.0 GiB of weights without the embedding, read at half of 4800 GB/s
    assert found["itl_ms"]["p50"] == pytest.approx(2 * 15.0 / 4800 * 1000, rel=0.1)
    assert found["costs"] == "data sheet of h200:1 at 50%"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--rate", "5"],
        ["--rate", "0", "--chip", "h200"],
        ["--rate", "5", "--chip", "h200", "--costs", "x"],
        ["--rate", "5", "--costs", "absent"],
        ["--rate", "5", "--chip", "abacus"],
        ["--rate", "5", "--chip", "cpu"],
        ["--rate", "5", "--workload", "w", "--chip", "h200"],
        ["--workload", "absent", "--costs", "{}"],
        ["--rate", "5", "--costs", "{}", "--prompt-tokens", "x"],
        ["--rate", "5", "--costs", "{}", "--prompt-tokens", "1000"],
        ["--rate", "5", "--costs", "{}", "--requests", "0"],
        ["--rate", "5", "--costs", "{}", "--set", "scheduler.token_budget=0"],
    ],
)
def test_bad_usage_is_one_line(words, jaxserve, recorded: Path):
    ran = jaxserve("lab", "simulate", *(word.format(recorded) for word in words))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_a_token_has_kv_in_every_group_of_layers() -> None:
    plan = {"max_len": 100, "block_bytes": 640, "block_size": 32, "windows": [None, 16, 16]}
    facts = subject._facts(plan, 0.0)
    assert facts.token_bytes == 60 and facts.windows == (None, 16, 16)


def test_groups_with_a_window_let_go_what_no_token_sees(tmp_path: Path) -> None:
    """A request of 400 tokens in three groups, in blocks of 8; two of them see 16 tokens."""
    windows = (None, 16, 16)
    load = [Arrival(0.0, 100, 300)]
    kept = [
        max(step.kv_used for step in simulate.play(config(), MODEL, load, windows=w).steps)
        for w in ((None,) * 3, windows)
    ]
    assert kept[0] == 3 * 50 and 50 < kept[1] < 50 + 2 * 32
    rig = Rig(tmp_path / "t", config(), costs=MODEL, windows=windows)
    rig.add(prompt(30), 5)
    rig.run()
    assert (known := subject.of_trace(rig.trace()).facts) is not None and known.windows == windows
    small = EngineConfig(cache=CacheConfig(block_size=8, memory_gib=1e-4))
    made = subject.resolved(small, subject.Facts(1000, 300.0, windows=windows))
    assert made.cache.num_blocks == int(1e-4 * 2**30) // (300 * 8 // 3)
