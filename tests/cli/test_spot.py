"""The supervisor of a spot VM: its unit and its start-up script."""

import configparser
import os
import subprocess
from pathlib import Path

from jaxserve.offline.stop import GRACE_SECONDS, PARKED

SPOT = Path(__file__).parents[2] / "tools" / "spot"


def test_the_unit_goes_on_after_75_and_waits_for_the_grace():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(SPOT / "jaxserve-batch.service")
    service = unit["Service"]
    assert GRACE_SECONDS + 5 <= float(service["TimeoutStopSec"]) < 30
    assert service["Restart"] == "on-failure"
    assert str(PARKED) not in service["RestartPreventExitStatus"].split()
    assert service["RestartPreventExitStatus"].split() == ["1", "2"]
    assert service["KillSignal"] == "SIGTERM"


def test_the_script_writes_what_the_unit_runs(tmp_path: Path):
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    (tmp_path / "jaxserve").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/ran\n')
    for name in ("systemctl", "jaxserve"):
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "ETC": str(tmp_path),
        "UNITS": str(tmp_path),
    }
    script = str(SPOT / "startup.sh")
    assert subprocess.run([script, "x"], env=environment, capture_output=True).returncode == 2
    arguments = ["in.jsonl", "--output", "/mnt/disk/out.jsonl", "--max-tokens", "9"]
    subprocess.run([script, *arguments], env=environment, check=True)
    assert "restart --no-block jaxserve-batch.service" in (tmp_path / "calls").read_text()
    unit = (tmp_path / "jaxserve-batch.service").read_text()
    (command,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    shell = command.removeprefix("ExecStart=/bin/sh -c ").strip("'")
    lines = (tmp_path / "jaxserve-batch.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines)
    subprocess.run(["/bin/sh", "-c", shell], env=environment | given, check=True)
    assert (tmp_path / "ran").read_text().split() == ["batch", *arguments]
