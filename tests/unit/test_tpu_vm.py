"""tools/tpu_vm: the commands it builds, and a job that outlives its machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import tpu_vm
from tools.tpu_vm import Machine, accelerator

ROOT = Path(__file__).parent.parent.parent
VM = Machine("vm", "us-central1-a", "p")
V5E = accelerator("v5litepod-8")


@pytest.mark.parametrize(
    ("name", "target", "hosts"),
    [
        ("v5litepod-1", "v5e:1x1", 1),
        ("v5litepod-8", "v5e:2x4", 1),
        ("v5litepod-16", "v5e:4x4", 2),
        ("v6e-4", "v6e:2x2", 1),
        ("v4-8", "v4:2x2x1", 1),
        ("v5p-16", "v5p:2x2x2", 2),
    ],
)
def test_types_are_taken_apart(name: str, target: str, hosts: int):
    kind = accelerator(name)
    assert (kind.target, kind.hosts) == (target, hosts)
    from jaxserve.preflight.target import parse

    assert str(parse(kind.target)) == target  # what preflight takes


@pytest.mark.parametrize("name", ["v5e-8", "v6e", "v6e-3", "v4-7", "v9-8", ""])
def test_unknown_types_are_refused(name: str):
    with pytest.raises(ValueError, match="--type"):
        accelerator(name)


def test_create_builds_what_gcloud_takes():
    (command,) = tpu_vm.create(VM, V5E, spot=True, disk=True)
    assert command[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "create", "vm"]
    given = dict(zip(command[6::2], command[7::2], strict=False))
    assert given["--zone"] == "us-central1-a" and given["--project"] == "p"
    assert given["--accelerator-type"] == "v5litepod-8"
    assert "--spot" in command
    disk = "source=projects/p/zones/us-central1-a/disks/vm-data,mode=read-write"
    assert command[-2:] == ["--data-disk", disk]


def test_a_slice_of_several_hosts_shares_no_disk_and_installs_everywhere():
    with pytest.raises(ValueError, match="2 hosts"):
        tpu_vm.create(VM, accelerator("v6e-16"), spot=False, disk=True)
    for command in tpu_vm.install(VM, Path()):
        assert command[command.index("--worker") + 1] == "all"


class Cloud:
    """A cloud that takes the machine away while the job runs, as often as told."""

    def __init__(self, preemptions: int, codes: list[int], no_capacity: int = 0):
        self.preemptions, self.codes, self.no_capacity = preemptions, codes, no_capacity
        self.state, self.disk, self.made, self.batches = "", False, 0, 0
        self.log: list[str] = []

    def run(self, command: list[str]) -> tuple[int, str]:
        verb = command[3] if command[2] == "disks" else command[4]
        self.log.append(f"{command[2]} {verb}")
        if command[2] == "disks":
            known, self.disk = self.disk, True
            return (0 if known else 1) if verb == "describe" else 0, ""
        if verb == "describe":
            return 0, f"{self.state}\n"
        if verb == "create":
            assert not self.state, "the old machine is still there"
            if self.no_capacity:
                self.no_capacity -= 1
                return 1, ""
            self.made, self.state = self.made + 1, "READY"
        elif verb == "delete":
            self.state = ""
        elif self.state != "READY":
            return 255, ""
        elif "jaxserve batch" in command[-1]:
            return self._batch(command[-1])
        return 0, ""

    def _batch(self, script: str) -> tuple[int, str]:
        assert self.disk and "/mnt/jaxserve/in.jsonl --output /mnt/jaxserve/out-in.jsonl" in script
        self.batches += 1
        if self.preemptions:
            self.preemptions -= 1
            self.state = "PREEMPTED"
            return 255, ""
        return self.codes.pop(0), ""


def job(cloud: Cloud) -> int:
    files = (Path("in.jsonl"), Path("c.toml"))
    return tpu_vm.run_job(VM, V5E, files, Path(), cloud.run, attempts=20, wait=lambda s: None)


@pytest.mark.parametrize("preemptions", [0, 1, 3])
def test_a_job_goes_on_after_preemptions(preemptions: int):
    cloud = Cloud(preemptions, [0], no_capacity=2)
    assert job(cloud) == 0
    assert cloud.made == preemptions + 1 and cloud.batches == preemptions + 1
    assert cloud.log.count("disks create") == 1  # one disk for all machines


@pytest.mark.parametrize(("codes", "found"), [([75, 75, 0], 0), ([1], 1), ([2], 2)])
def test_a_job_ends_when_the_batch_has(codes: list[int], found: int):
    cloud = Cloud(0, codes)
    assert job(cloud) == found and cloud.made == 1 and not cloud.codes


def test_a_job_that_never_ends_says_that_it_can_be_resumed():
    assert job(Cloud(99, [0])) == 75


def test_dry_run_prints_commands_and_runs_none(tmp_path: Path):
    script = [str(ROOT / "tools" / "tpu_vm.sh"), "job", "vm", "--zone", "z", "--type", "v6e-8"]
    arguments = ["--input", "in.jsonl", "--dry-run"]
    environment = os.environ | {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}  # no gcloud
    ran = subprocess.run(
        [*script, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert all(line.startswith("gcloud ") for line in lines)
    assert "--spot" in next(line for line in lines if "tpu-vm create" in line)
    assert "jaxserve batch" in lines[-1]


@pytest.mark.parametrize("arguments", [["create", "vm"], ["job", "vm", "--type", "v6e-8"]])
def test_what_is_missing_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert tpu_vm.main([*arguments, "--zone", "z", "--dry-run"]) == 2
    assert "needs --" in capsys.readouterr().err
