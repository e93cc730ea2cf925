"""Cloud TPU VMs for jaxserve, as the gcloud commands one would type; needs nothing but Python.

python -m tools.tpu_vm create NAME --zone Z --type v5litepod-8 [--spot] [--disk]   a VM or a slice
python -m tools.tpu_vm install NAME --zone Z [--source .]           jaxserve[tpu] on every worker
python -m tools.tpu_vm pull NAME --zone Z --model M                 weights, on every worker
python -m tools.tpu_vm preflight NAME --zone Z --type T --config F  compile for it, on this machine
python -m tools.tpu_vm job NAME --zone Z --type T --input IN.jsonl --config F
                                       a batch job on a spot VM, begun again after each preemption
python -m tools.tpu_vm delete NAME --zone Z [--disk]

The job's files lie on a persistent disk that outlives the VM, so that after a preemption a new VM
goes on where the old one was killed.  --dry-run prints every command and runs none.
"""

import argparse
import dataclasses
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Command = list[str]
MOUNT = "/mnt/jaxserve"
RESUMABLE = 75  # exit code of `jaxserve batch`: stopped early, run it again
UNREACHABLE = 255  # exit code of ssh
_GONE = ("PREEMPTED", "TERMINATED", "STOPPED", "")
_ALIVE = "READY"

# accelerator type -> (preflight's chip, software version, disk type, chips a host)
_TYPES = {
    "v4": ("v4", "tpu-ubuntu2204-base", "pd-balanced", 4),
    "v5litepod": ("v5e", "v2-alpha-tpuv5-lite", "pd-balanced", 8),
    "v5p": ("v5p", "v2-alpha-tpuv5", "pd-balanced", 4),
    "v6e": ("v6e", "v2-alpha-tpuv6e", "hyperdisk-balanced", 8),
}
_SHAPES = {  # chips -> topology of the two-dimensional kinds
    **{1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8"}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """An accelerator type of the cloud, taken apart."""

    name: str  # v5litepod-8; the number counts cores for v4 and v5p, chips for the others
    chip: str
    chips: int
    version: str
    disk_type: str
    hosts: int

    @property
    def target(self) -> str:
        """As `jaxserve preflight --target` takes it."""
        shapes = _CUBES if self.chip in ("v4", "v5p") else _SHAPES
        return f"{self.chip}:{shapes[self.chips]}"


def accelerator(name: str) -> Accelerator:
    """Raises ValueError for a type that is not known."""
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", name)
    if not match or match[1] not in _TYPES:
        raise ValueError(f"--type {name!r}: write one like {', '.join(f'{t}-8' for t in _TYPES)}")
    chip, version, disk, per_host = _TYPES[match[1]]
    count = int(match[2])
    chips = count // 2 if chip in ("v4", "v5p") else count
    shapes = _CUBES if chip in ("v4", "v5p") else _SHAPES
    if chips not in shapes or (chip in ("v4", "v5p") and count % 2):
        raise ValueError(f"--type {name!r}: there is no slice of {chips} chips of {chip}")
    return Accelerator(name, chip, chips, version, disk, max(1, chips // per_host))


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a VM is."""

    name: str
    zone: str
    project: str | None = None

    @property
    def where(self) -> Command:
        project = ["--project", self.project] if self.project else []
        return ["--zone", self.zone, *project]

    @property
    def disk(self) -> str:
        return f"{self.name}-data"

    def ssh(self, script: str, *, every_worker: bool) -> Command:
        worker = "all" if every_worker else "0"
        base = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", self.name, *self.where]
        return [*base, "--worker", worker, "--command", script]

    def copy(self, source: str, target: str, *, every_worker: bool) -> Command:
        worker = "all" if every_worker else "0"
        base = ["gcloud", "compute", "tpus", "tpu-vm", "scp", "--recurse", source]
        return [*base, f"{self.name}:{target}", *self.where, "--worker", worker]


def create(machine: Machine, kind: Accelerator, *, spot: bool, disk: bool) -> list[Command]:
    """A VM or a slice, on request with a disk made by `create_disk`."""
    command = ["gcloud", "compute", "tpus", "tpu-vm", "create", machine.name, *machine.where]
    command += ["--accelerator-type", kind.name, "--version", kind.version]
    if spot:
        command.append("--spot")
    if disk:
        if kind.hosts > 1:
            raise ValueError(
                f"--disk: {kind.name} has {kind.hosts} hosts, which cannot all write to one disk"
            )
        source = f"zones/{machine.zone}/disks/{machine.disk}"
        if machine.project:
            source = f"projects/{machine.project}/{source}"
        command += ["--data-disk", f"source={source},mode=read-write"]
    return [command]


def create_disk(machine: Machine, kind: Accelerator, gigabytes: int) -> Command:
    base = ["gcloud", "compute", "disks", "create", machine.disk, *machine.where]
    return [*base, "--size", f"{gigabytes}GB", "--type", kind.disk_type]


def describe_disk(machine: Machine) -> Command:
    base = ["gcloud", "compute", "disks", "describe", machine.disk, *machine.where]
    return [*base, "--format", "value(status)"]


def state(machine: Machine) -> Command:
    base = ["gcloud", "compute", "tpus", "tpu-vm", "describe", machine.name, *machine.where]
    return [*base, "--format", "value(state)"]


def delete(machine: Machine) -> Command:
    base = ["gcloud", "compute", "tpus", "tpu-vm", "delete", machine.name, *machine.where]
    return [*base, "--quiet"]


def delete_disk(machine: Machine) -> Command:
    return ["gcloud", "compute", "disks", "delete", machine.disk, *machine.where, "--quiet"]


def install(machine: Machine, source: Path) -> list[Command]:
    """Python 3.12 in an environment of its own, and this folder with the extra `tpu`."""
    script = (
        "set -e; curl -LsSf https://astral.sh/uv/install.sh | sh; "
        "export PATH=$HOME/.local/bin:$PATH; uv venv --quiet --clear --python 3.12 ~/jaxserve-env; "
        "uv pip install --quiet --python ~/jaxserve-env/bin/python "
        "'./jaxserve-source[tpu]'; ~/jaxserve-env/bin/jaxserve --version"
    )
    remove = machine.ssh("rm -rf jaxserve-source", every_worker=True)
    copied = machine.copy(str(source), "jaxserve-source", every_worker=True)
    return [remove, copied, machine.ssh(script, every_worker=True)]


def pull(machine: Machine, model: str) -> list[Command]:
    script = f"~/jaxserve-env/bin/jaxserve model pull {shlex.quote(model)}"
    return [machine.ssh(script, every_worker=True)]


def preflight(kind: Accelerator, config: Path) -> list[Command]:
    """On this machine: compiling needs no TPU."""
    base = [sys.executable, "-m", "jaxserve.cli.main", "preflight", "--target", kind.target]
    return [[*base, "--config", str(config)]]


def mount(machine: Machine) -> Command:
    """The data disk, formatted when it is new; never when it holds anything."""
    script = (
        'set -e; device=$(lsblk -dpno NAME,TYPE,MOUNTPOINTS | awk \'$2=="disk" && $3==""\' '
        "| awk '{print $1}' | while read d; do [ $(lsblk -no NAME $d | wc -l) = 1 ] && echo $d; "
        f"done | tail -1); sudo mkdir -p {MOUNT}; "
        'test -n "$(sudo blkid -o value -s TYPE $device)" || sudo mkfs.ext4 -q $device; '
        f"mountpoint -q {MOUNT} || sudo mount $device {MOUNT}; sudo chown $(id -u) {MOUNT}"
    )
    return machine.ssh(script, every_worker=False)


def batch(machine: Machine, name: str, config: Path | None) -> Command:
    """The job; run again it goes on where it ended."""
    words = ["~/jaxserve-env/bin/jaxserve", "batch", f"{MOUNT}/{name}"]
    words += ["--output", f"{MOUNT}/out-{name}"]
    if config is not None:
        words += ["--config", f"{MOUNT}/{config.name}"]
    return machine.ssh(" ".join(words), every_worker=False)


Run = Callable[[Command], tuple[int, str]]


def run_job(
    machine: Machine,
    kind: Accelerator,
    files: tuple[Path, Path | None],  # input, config
    source: Path,
    run: Run,
    *,
    attempts: int = 100,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Runs a batch job to its end over any number of preemptions; returns its exit code.

    A VM that is gone is deleted and made again, with the disk of the one before.
    """
    given, config = files
    if run(describe_disk(machine))[0]:
        _must(run, create_disk(machine, kind, 100))
    fresh = True
    for _ in range(attempts):
        status = run(state(machine))[1].strip()
        if status not in (*_GONE, _ALIVE):  # on its way
            wait(30.0)
            continue
        if status != _ALIVE:
            if status:
                run(delete(machine))
            code = run(create(machine, kind, spot=True, disk=True)[0])[0]
            if code:  # no capacity: later
                wait(60.0)
                continue
            fresh = True
        if fresh:
            steps = [*install(machine, source), mount(machine)]
            steps += [
                machine.copy(str(file), MOUNT, every_worker=False)
                for file in (given, config)
                if file is not None
            ]
            if any(run(step)[0] for step in steps):  # preempted meanwhile
                wait(10.0)
                continue
            fresh = False
        code = run(batch(machine, given.name, config))[0]
        if code not in (RESUMABLE, UNREACHABLE):
            return code
        wait(10.0)
    return RESUMABLE


def _must(run: Run, command: Command) -> None:
    code, _ = run(command)
    if code:
        raise RuntimeError(f"exit code {code} of: {shlex.join(command)}")


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    machine = Machine(args.name, args.zone, args.project)
    run = _print if args.dry_run else _execute
    try:
        return _command(args, machine, run)
    except (ValueError, RuntimeError) as error:
        print(f"tpu_vm: error: {error}", file=sys.stderr)
        return 2


def _command(args: argparse.Namespace, machine: Machine, run: Run) -> int:
    kind = accelerator(args.type) if args.type else None
    needs_type = ("create", "preflight", "job")
    if args.command in needs_type and kind is None:
        raise ValueError(f"{args.command} needs --type")
    if args.command == "job":
        if args.input is None:
            raise ValueError("job needs --input")
        assert kind is not None
        if args.dry_run:
            return _dry_job(args, machine, kind)
        return run_job(machine, kind, (args.input, args.config), args.source, run)
    for command in _commands(args, machine, kind):
        code, _ = run(command)
        if code:
            return code
    return 0


def _commands(
    args: argparse.Namespace, machine: Machine, kind: Accelerator | None
) -> list[Command]:
    if args.command == "install":
        return install(machine, args.source)
    if args.command == "pull":
        return pull(machine, args.model)
    if args.command == "delete":
        return [delete(machine), *([delete_disk(machine)] if args.disk else [])]
    assert kind is not None
    if args.command == "preflight":
        if args.config is None:
            raise ValueError("preflight needs --config")
        return preflight(kind, args.config)
    disk = [create_disk(machine, kind, 100)] if args.disk else []
    return [*disk, *create(machine, kind, spot=args.spot, disk=args.disk)]


def _dry_job(args: argparse.Namespace, machine: Machine, kind: Accelerator) -> int:
    """What a job without any preemption runs."""

    def run(command: Command) -> tuple[int, str]:
        _print(command)
        return (1 if command == describe_disk(machine) else 0), ""

    return run_job(machine, kind, (args.input, args.config), args.source, run)


def _print(command: Command) -> tuple[int, str]:
    print(shlex.join(command))
    return 0, ""


def _execute(command: Command) -> tuple[int, str]:
    asks = "describe" in command
    print(f"+ {shlex.join(command)}", file=sys.stderr)
    ran = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if asks else None)
    return ran.returncode, ran.stdout or ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/tpu_vm.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = ("create", "install", "pull", "preflight", "job", "delete")
    parser.add_argument("command", choices=commands)
    parser.add_argument("name", help="of the VM")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--project")
    parser.add_argument("--type", help="accelerator type, for example v5litepod-8 or v6e-8")
    parser.add_argument("--spot", action="store_true", help="cheaper, and may vanish")
    parser.add_argument("--disk", action="store_true", help="with a persistent disk NAME-data")
    parser.add_argument("--source", type=Path, default=Path(), help="this repository")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
