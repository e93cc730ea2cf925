"""Deadlines from the command line, a file and a request to the engine."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxserve import settings
from jaxserve.config import EngineConfig, SloClass, SloConfig
from jaxserve.openai_api import bodies
from jaxserve.request import SamplingParams
from jaxserve.settings import SettingsError
from tests.cli.test_bench import lines, write

CLASSES = SloConfig(50.0, 5.0, {"chat": SloClass(300.0, 40.0), "b-1": SloClass()}, 0.2)


def test_settings_with_classes_come_back_from_their_text(tmp_path: Path):
    config = dataclasses.replace(EngineConfig(), slo=CLASSES)
    assert settings.loads(settings.dump(config)) == config
    file = tmp_path / "c.toml"
    file.write_text("[slo]\ntpot_ms = 7\n[slo.classes.chat]\nttft_ms = 300\n")
    found = settings.read(file, ["slo.margin=0"]).slo
    assert found == SloConfig(tpot_ms=7.0, classes={"chat": SloClass(300.0, 0.0)}, margin=0.0)


@pytest.mark.parametrize(
    "text",
    [
        "slo.classes=3",
        "slo.classes={chat={ttft=1}}",
        "slo.classes={chat=3}",
        "slo.classes={chat={ttft_ms=-1}}",
        'slo.classes={"a b"={}}',
        "slo.tpot_ms=-1",
        "slo.margin=1",
    ],
)
def test_wrong_classes_are_refused_by_name(text: str):
    with pytest.raises(SettingsError, match="slo"):
        settings.read(None, [text])


def test_options_turn_the_mode_to_time_unless_another_was_chosen(jaxserve, assembled, tmp_path):
    path = write(tmp_path / "w", lines(3))
    options = ("--tpot-slo", "40", "--ttft-slo", "chat=300", "--tpot-slo", "chat=10")
    assert jaxserve("bench", "--workload", path, *options).code == 0
    config = assembled[-1].config
    assert config.scheduler.mode == "time"
    assert config.slo == SloConfig(tpot_ms=40.0, classes={"chat": SloClass(300.0, 10.0)})
    chosen = ("--set", "scheduler.mode=dynamic", "--tpot-slo", "40")
    assert jaxserve("bench", "--workload", path, *chosen).code == 0
    assert assembled[-1].config.scheduler.mode == "dynamic"
    for wrong in ("x", "chat=", "=3x", "-1"):
        ran = jaxserve("bench", "--workload", path, f"--tpot-slo={wrong}")
        assert ran.code == 2 and "tpot" in ran.err


def test_the_promise_is_the_limit_for_goodput(jaxserve, tmp_path):
    path = write(tmp_path / "w", lines(3))
    ran = jaxserve("bench", "--workload", path, "--json", "--tpot-slo", "40", "--slo-ttft-ms", "9")
    found = json.loads(ran.out)["goodput"]
    assert (found["slo_ttft_ms"], found["slo_tpot_ms"]) == (9.0, 40.0)


def test_a_request_names_its_class():
    call = bodies.parse_text({"prompt": "a", "slo_class": "chat"}, SamplingParams())
    assert call.tasks[0].sampling.slo_class == "chat"
    with pytest.raises(ValueError, match="slo_class"):
        SamplingParams(slo_class="x" * 65)


def test_a_class_that_is_not_in_the_settings_is_refused(jaxserve, tmp_path):
    path = write(tmp_path / "w", [{**line, "slo_class": "chat"} for line in lines(3)])
    ran = jaxserve("bench", "--workload", path)
    assert ran.code == 2 and "slo_class='chat'" in ran.err and "none" in ran.err
    assert jaxserve("bench", "--workload", path, "--ttft-slo", "chat=9").code == 0
