"""`lab tune`: what it simulates, what it measures, what it chooses, and what it writes."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxserve import settings
from jaxserve.batch.buckets import resolve
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.costs import CostModel
from jaxserve.lab import arrivals, bench_process, compare, tune, tune_text
from jaxserve.lab.compare import Comparison, Run
from jaxserve.lab.subject import Facts
from jaxserve.lab.tune import Candidate, Limits, Load
from tests.cli.test_bench import lines, write
from tests.lab.rigs import Rig, prompt
from tests.lab.test_compare import FAKE, ROOT, report
from tests.lab.test_record import config as recorded_config

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MODEL = CostModel(SIZES, tuple(0.004 + 5e-5 * size for size in SIZES), single_context=1e-8)
CONFIG = EngineConfig()
FACTS = Facts(4000, 1000.0)


def load(count: int = 60, rate: float = 10.0) -> Load:
    drawn = arrivals.generated(
        count, rate, arrivals.lengths("200..1500", 4000), arrivals.lengths("5..30", 4000)
    )
    return Load(drawn, MODEL, FACTS)


def test_the_bound_is_the_largest_budget_whose_full_steps_are_short_enough():
    points = tune.curve(load(), 32)
    assert [p.budget for p in points] == [32, 64, 128, 256, 512, 1024, 2048]
    for point in points:
        assert point.step_ms >= 1e3 * MODEL.program_s(point.budget)
        assert point.tokens_per_s == pytest.approx(1e3 * point.budget / point.step_ms)
    assert tune.bound(points, 20) == 256 and tune.bound(points, 1e6) == 2048
    assert tune.bound(points, None) == 2048 and tune.bound(points, 1) is None


@pytest.mark.parametrize("tpot, best", [(7.5, (32, 64, 128)), (None, (512, 1024, 2048))])
def test_a_limit_on_tokens_asks_for_a_small_budget_and_none_for_a_large_one(tpot, best):
    """Half of what a budget of 64 can serve."""
    found = tune.plan(CONFIG, load(16, 5.0), Limits(1000, tpot))
    first, tried = found.simulated[0], [one.candidate for one in found.simulated]
    assert first.candidate.budget in best and first.report["goodput"]["share"] == 1.0
    goods = [tune.merit(one.report) for one in found.simulated]
    assert goods == sorted(goods, reverse=True)
    assert Candidate(512, 64, 8) in tried and len(set(tried)) == len(tried)
    assert {c.partials for c in tried if c.budget == first.candidate.budget} == {1, 2, 8}
    limit = 4 * found.bound if found.bound else 128
    assert {c.budget for c in tried} - {512} == {
        b for b in tune.BUDGETS if b <= min(limit, 4000)
    } - {512}


@pytest.mark.parametrize("single", [False, True])
def test_budgets_are_simulated_with_the_buckets_that_this_device_has(single: bool, monkeypatch):
    seen = []

    def play(config: EngineConfig, *args, **options):
        seen.append(config.buckets)
        return original(config, *args, **options)

    original = tune.simulate.play
    monkeypatch.setattr(tune.simulate, "play", play)
    of = dataclasses.replace(load(4), facts=dataclasses.replace(FACTS, single=single))
    tune.plan(CONFIG, of, Limits(1000, 7.5))
    assert len({buckets.tokens[-1] for buckets in seen}) > 2
    assert {1 in buckets.tokens and 1 in buckets.rows for buckets in seen} == {single}


@pytest.mark.parametrize("budget, seqs", [(32, 64), (512, 64), (128, 4000)])
def test_what_comes_to_the_same_settings_is_neither_simulated_nor_measured_twice(
    budget: int, seqs: int, monkeypatch
):
    """Seats are cut to the budget.  More seats than the twin's are still tried."""
    played: list[EngineConfig] = []

    def play(config: EngineConfig, *args, **options):
        played.append(config)
        return original(config, *args, **options)

    original = tune.simulate.play
    monkeypatch.setattr(tune.simulate, "play", play)
    rules = SchedulerConfig(token_budget=budget, max_seqs=seqs)
    now = dataclasses.replace(CONFIG, scheduler=rules)
    prompts, outputs = arrivals.lengths("20..60", 4000), arrivals.lengths("100..200", 4000)
    many = Load(arrivals.generated(100, 1000.0, prompts, outputs), MODEL, FACTS)
    found = tune.plan(now, many, Limits(1000, None)).simulated
    assert len({settings.dump(config) for config in played}) == len(played) == len(found)
    base = tune.current(now)
    tried = tune.best_few(found, base, len(found))
    made = [settings.dump(tune.resolved(settings.assign(now, c.options), FACTS)) for c in tried]
    assert tried[0] == base and len(set(made)) == len(made) > 5
    assert {c.seqs for c in tried if c.budget == 512} >= {16, 32, 64, 128}


def test_few_are_measured_what_runs_now_first():
    reports = {"goodput": {"requests_per_s": 1.0}, "output_tokens_per_s": 1, "ttft_s": {"p99": 1}}
    tried = [Candidate(64, 8, p) for p in (1, 2, 8)] + [Candidate(512, 64, 8), Candidate(128, 8, 1)]
    found = [tune.Simulated(c, reports, 8) for c in tried]
    base = Candidate(512, 64, 8)
    assert tune.best_few(found, base, 5) == [base, Candidate(64, 8, 1), Candidate(128, 8, 1)]
    assert tune.best_few(found, base, 1) == [base, Candidate(64, 8, 1)]


@pytest.fixture(scope="module")
def a_trace(tmp_path_factory: pytest.TempPathFactory):
    rig = Rig(tmp_path_factory.mktemp("run") / "t", recorded_config())
    rig.add(prompt(20), 20)
    rig.run()
    return rig.trace()


def measured(trace, goods: dict[Candidate, list[float]], speed: float = 50.0) -> Comparison:
    runs = {
        candidate.variant.name: [
            Run(report(speed * (1 + n / 100), goodput={"requests_per_s": good}), trace, False)
            for n, good in enumerate(values)
        ]
        for candidate, values in goods.items()
    }
    return compare.compare("W", runs, {}, "goodput requests/s")


def test_what_runs_now_stays_unless_another_is_better_by_more_than_noise(a_trace):
    base, a, b = (Candidate(size, 8, 8) for size in (512, 64, 128))
    noise = measured(a_trace, {base: [5.0, 5.2, 5.1], a: [5.3, 5.1, 5.2], b: [4.0, 4.1, 4.0]})
    assert tune.choose(noise, [base, a, b]).candidate == base
    better = measured(a_trace, {base: [5.0, 5.2, 5.1], a: [6.0, 6.2, 6.1], b: [8.0, 8.3, 8.1]})
    choice = tune.choose(better, [base, a, b])
    assert choice.candidate == b and "8.13 against 5.10" in choice.why
    failed = measured(a_trace, {a: [6.0, 6.2], b: [8.0, 8.3]})
    failed = dataclasses.replace(failed, failed={base.variant.name: "no memory"})
    with pytest.raises(ValueError, match="no memory"):
        tune.choose(failed, [base, a, b])


def test_under_overload_the_bounded_queue_keeps_what_the_endless_one_loses():
    config = EngineConfig(scheduler=SchedulerConfig(max_seqs=32))
    found = tune.overload(config, load(14, 1000.0), Candidate(256, 32, 8), Limits(500, None))
    assert found.unbounded < 0.5 * found.calm
    assert found.bounded > 0.9 * found.calm
    assert 0.3 < found.refused < 0.7 and found.max_queue >= 1


def test_the_command_measures_chooses_and_writes_a_config_that_the_engine_takes(
    jaxserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With one seat requests run one after the other; steps of the fake engine take 20 us a token
    of their bucket, whatever is in it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    known = bench_process.Processes.__init__.__kwdefaults__
    monkeypatch.setattr(
        bench_process.Processes.__init__, "__kwdefaults__", {**known, "command": FAKE}
    )
    workload, out = write(tmp_path / "w.jsonl", lines(8, max_tokens=20)), tmp_path / "best.toml"
    words = ["lab", "tune", "--workload", workload, "--ttft-slo", 500, "--tpot-slo", 500]
    words += ["--set", "scheduler.max_seqs=1", "--measure", 1, "--repeats", 1, "--write", out]
    ran = jaxserve(*words, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["tried"][0] == {"budget": 512, "seqs": 1, "partials": 8}
    assert found["plan"]["simulated"][0]["candidate"]["seqs"] > 1
    names = [result["name"] for result in found["measured"]["results"]]
    assert len(names) == 2 and names[1].startswith(f"budget {found['tried'][1]['budget']}, ")
    chosen = found["choice"]["candidate"]
    assert chosen in found["tried"]
    written = settings.read(out)
    assert tune.current(written) == Candidate(**chosen)
    assert written.server.max_queue == found["overload"]["max_queue"]
    assert resolve(written, 256, 1000).buckets.tokens[-1] == chosen["budget"]


def test_the_text_says_what_was_simulated_measured_and_chosen(a_trace):
    few = load(12, 5.0)
    plan = tune.plan(CONFIG, few, Limits(1000, 20))
    base, other = tune.best_few(plan.simulated, tune.current(CONFIG), 1)
    compared = measured(a_trace, {base: [5.0, 5.2, 5.1], other: [6.0, 6.2, 6.1]})
    choice = tune.choose(compared, [base, other])
    checked = tune.Overload(20.0, 7, 9.0, 1.0, 8.5, 0.4)
    found = tune.Tuned(Limits(1000, 20), plan, [base, other], compared, choice, checked)
    text = tune_text.text(found)
    for part in (
        "up to a budget of 256",
        f"the best of {len(plan.simulated)}",
        f"Choice: {other.variant.name}: goodput requests/s 6.10 against 5.10",
        "8.50 with at most 7 waiting (40% refused), against 9.00 without overload",
        f"--set scheduler.token_budget={other.budget}",
    ):
        assert part in " ".join(text.split())
    written = settings.loads(tune_text.toml(CONFIG, found))
    assert written.server.max_queue == 7 and tune.current(written) == other


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--tpot-slo", "0"],
        ["--tpot-slo", "5", "--workload", "absent"],
        ["--tpot-slo", "5", "--measure", "0"],
        ["--tpot-slo", "5", "--costs", "abacus"],
        ["--tpot-slo", "5", "--write", "absent/f"],
        ["--tpot-slo", "5", "--set", "scheduler.token_bugdet=1"],
    ],
)
def test_bad_usage_is_refused_before_anything_runs(words, jaxserve, assembled, tmp_path: Path):
    workload = write(tmp_path / "w.jsonl", lines(1))
    ran = jaxserve("lab", "tune", "--workload", workload, *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert assembled == []
