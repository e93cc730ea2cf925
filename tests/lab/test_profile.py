"""`lab profile` in virtual time: the costs of the runner come out, whatever drifts; the files and
pages that show them."""

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest

from jaxserve.batch.step import Batch
from jaxserve.config import BucketConfig, CacheConfig, EngineConfig, SchedulerConfig
from jaxserve.lab import cost_table, fit, profile, profile_html, profile_text
from jaxserve.lab.probes import Probe, Probes
from jaxserve.lab.profile import Profile, Target
from tests.lab.rigs import Rig, shape_of_batch
from tests.lab.test_fit import TRUTH

CONFIG = EngineConfig(
    cache=CacheConfig(block_size=16, num_blocks=6000, prefix_caching=False),
    scheduler=SchedulerConfig(token_budget=256, max_seqs=32),
    buckets=BucketConfig(tokens=(8, 16, 64, 256), rows=(8, 32)),
)


class Drifting:
    """Seconds of a batch by `TRUTH`, times a drift that grows, noise and pauses."""

    def __init__(self, drift: float, noise: float, pauses: float) -> None:
        self._rng = random.Random(11)
        self._drift, self._noise, self._pauses = drift, noise, pauses
        self._steps = 0

    def __call__(self, batch: Batch) -> float:
        self._steps += 1
        factor = 1 + self._drift * math.sin(self._steps / 300)
        factor *= math.exp(self._rng.gauss(0, self._noise))
        factor *= 5 if self._rng.random() < self._pauses else 1
        return TRUTH.predict(shape_of_batch(batch)) * factor


def measured(tmp_path: Path, seconds) -> Profile:
    rig = Rig(tmp_path / "t", CONFIG, seconds=seconds, max_len=4096)
    target = Target(rig.config, rig.runner, rig.engine, rig.records)
    found = profile.profile(target, 0.5, clock=rig.clock)
    rig.recording.close()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return measured(tmp_path_factory.mktemp("profile"), Drifting(0.3, 0.02, 0.01))


def test_what_was_drawn_is_what_the_batch_says():
    rig_config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, max_len=4096))
    made = Probes(rig_config, 50)
    for probe in (
        Probe((1, 700, 33), (), "greedy"),
        Probe((5,), ((0, 7), (100, 30)), "greedy"),
        Probe((), ((64, 200),), "none"),
        Probe((), ((3, 1), (0, 9)), "random"),
        Probe((9, 9), (), "full"),
    ):
        batch = made.batch(probe)
        shape = batch.shape
        assert shape == shape_of_batch(batch)
        assert shape.tokens == probe.tokens and shape.sampler == probe.sampler
        slots = batch.inputs.slots[: probe.tokens]
        assert len(set(slots.tolist())) == probe.tokens
    batch = Probes(rig_config, 50, windows=(None, 40, 40)).batch(
        Probe((5, 700), ((0, 30),), "greedy")
    )
    slots = batch.inputs.slots[:, :32].ravel()
    assert batch.inputs.slots.shape[0] == 3 and len(set(slots.tolist())) == len(slots)


def test_without_noise_the_costs_come_out(tmp_path: Path):
    exact = measured(tmp_path, Drifting(0.0, 0.0, 0.0))
    assert exact.held_out.p95 < 1e-3 and exact.noise.p95 < 1e-9
    assert exact.service is not None and exact.service.p95 < 1e-3


def test_under_drift_noise_and_pauses_held_out_shapes_are_predicted(found: Profile):
    assert found.rounds >= profile.LEAST_ROUNDS and found.held_out.steps == profile.HELD_OUT
    assert found.noise.p95 > 0.03, "there was noise to see"
    assert found.held_out.median <= 0.05 and found.held_out.p95 <= 0.15


def test_a_runner_that_reports_no_time_cannot_be_profiled(tmp_path: Path):
    with pytest.raises(ValueError, match="no device time"):
        measured(tmp_path, lambda batch: 0.0)


def test_rounds_slower_as_a_whole_do_not_count():
    times = np.array([0.01, 0.02, 0.5])
    settled, noise = profile.settle([(times * factor).tolist() for factor in (1, 1.8, 0.7, 1)])
    assert settled / settled[0] == pytest.approx(times / times[0])
    assert noise.p95 > 0.3


def test_a_pause_in_the_fastest_round_does_not_make_a_shape_look_slow():
    """The median of (10, 2, 3) is 3 where all others have 2: the rounds' factors tell."""
    times = np.array([0.01, 0.02, 0.05, 0.07])
    rounds = [times * factor for factor in (1, 2, 3)]
    rounds[0][0] *= 10
    settled, _ = profile.settle([line.tolist() for line in rounds])
    assert settled / settled[1] == pytest.approx(times / times[1])


def test_every_costed_program_is_measured(found: Profile):
    assert found.costs.tokens == CONFIG.buckets.tokens and found.costs.rows == CONFIG.buckets.rows
    assert set(found.costs.sampling) == {"greedy", "random", "full"}
    assert found.costs.host > 0


def test_table_text_and_object_say_the_same(found: Profile, tmp_path: Path):
    table = profile_text.table(found, "m", {"device": "1 x cpu"})
    cost_table.save(tmp_path / "t.json", table)
    assert cost_table.load(tmp_path / "t.json") == table
    text = profile_text.text(found, table)
    made = json.loads(json.dumps(profile_text.as_object(found, table)))
    assert made["errors"]["held-out shapes"]["steps"] == profile.HELD_OUT
    assert f"{found.held_out.median:.1%}" in text and "program[256]" in text
    assert {"T(bucket)", "T_decode(context)", "T_prefill(prefix)"} <= set(made["curves"])
    assert len(made["curves"]["T_mixed(decodes)"]["64 tokens"]) > 2


def test_the_page_loads_nothing_and_holds_every_plot(found: Profile):
    page = profile_html.page(found, profile_text.table(found, "m<b>", {"device": "cpu"}))
    assert page.count("<svg") == 6 and page.count("<circle") > 60
    assert "http" not in page and "m&lt;b&gt;" in page and "<b>" not in page
    assert not re.search(r"[=\",( ]-?(nan|inf)\b", page)


def test_the_command_writes_table_and_page(jaxserve, assembled, tmp_path: Path):
    out, html = tmp_path / "table.json", tmp_path / "page.html"
    options = ("--seconds", "0.01", "--set", "scheduler.token_budget=64")
    ran = jaxserve("lab", "profile", *options, "--output", out, "--html", html, "--json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    table = cost_table.load(out)
    assert table.costs.tokens == assembled[0].config.buckets.tokens
    assert dict(table.costs.sampling) == {k: tuple(v) for k, v in made["costs"]["sampling"].items()}
    assert "<svg" in html.read_text() and str(out) in ran.err
    assert assembled[0].runner.closed
    text = jaxserve("lab", "profile", *options).out
    assert "held-out shapes" in text and "program[64]" in text


@pytest.mark.parametrize(
    "median, p95, verdict",
    [
        (0.05, 0.15, "good"),
        (0.051, 0.1, "rough"),
        (0.01, 0.151, "rough"),
        (0.15, 0.45, "rough"),
        (0.151, 0.2, "useless"),
        (0.01, 0.451, "useless"),
    ],
)
def test_a_table_that_predicts_badly_is_called_so_and_one_far_off_is_not_kept(
    jaxserve, assembled, tmp_path: Path, monkeypatch, median: float, p95: float, verdict: str
):
    kept, out, original = tmp_path / "costs" / "k.json", tmp_path / "o.json", profile.profile

    def far_off(*args, **options) -> Profile:
        assembled[-1].cost_file = kept
        found = original(*args, **options)
        return dataclasses.replace(found, held_out=fit.Errors(median, p95, 24))

    monkeypatch.setattr(profile, "profile", far_off)
    options = ("--seconds", "0.01", "--set", "scheduler.token_budget=64", "--output", out)
    page = tmp_path / "p.html"
    ran = jaxserve("lab", "profile", *options, "--html", page)
    useless = verdict == "useless"
    assert ran.code == int(useless) and out.exists() and kept.exists() != useless
    assert (f"not kept: Held-out shapes are off by {median:.1%}" in ran.err) == useless
    bound = {"good": "within the aim of 5% and 15%", "rough": "beyond the aim of 5% and 15%"}
    for text in (ran.out, page.read_text()):
        assert bound.get(verdict, "beyond the limit of 15% and 45%") in text
        assert ("idle device" in text) == (verdict != "good")
    assert f"off by {median:.1%} (median) and {p95:.1%} (P95)" in cost_table.load(out).source
    if useless:
        assert jaxserve("lab", "profile", *options, "--no-keep").code == 0 and not kept.exists()
        ran = jaxserve("lab", "profile", *options, "--keep-anyway", "--json")
        assert ran.code == 0 and kept.exists() and json.loads(ran.out)["verdict"] == verdict


@pytest.mark.parametrize(
    "wrong", [("--seconds", "0"), ("--output", "/nowhere/t.json"), ("--html", "/nowhere/p.html")]
)
def test_bad_usage_is_said_before_the_model_is_read(jaxserve, assembled, wrong):
    ran = jaxserve("lab", "profile", *wrong)
    assert ran.code == 2 and not assembled and wrong[0] in ran.err
