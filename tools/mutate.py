"""Do the tests notice?  Puts hand-made faults into a copy of the code, one at a time; runs tests.

    python tools/mutate.py [--only NAME ...] [--jobs N] [--log FILE]

With --log every verdict is kept in FILE as it comes, and a later run over the same code and tests
goes on from there.  Tests share one compile cache for the run, so that a fault on the host does not
compile the tiny models again.  A file of tests must be green without a fault before its first fault
is tried.

tools/mutations.toml lists the faults: a file, the exact text that is there, what replaces it, why
that is wrong, and the tests that should turn red.  Exit code 0: at least 95 % did.  1: fewer.  2: a
text was not found exactly once, or the tests are not green without a fault; then the result would
mean nothing.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NEEDED = 0.95  # share of the faults that must be noticed
CPU_S = 600  # of processor time, however busy the machine: tests that spin are noticed too
WALL_S = 7200
_FAILED, _GREEN = 1, 0  # pytest's exit codes


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    find: str  # occurs exactly once in `file`
    replace: str
    why: str
    tests: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    mutation: Mutation
    killed: bool
    detail: str  # the first test that failed, or why there is none
    seconds: float


class BadMutation(Exception):
    """The list does not fit the code."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=(), help="names of faults to try")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    parser.add_argument("--log", type=Path, help="verdicts are kept here, and read from here")
    args = parser.parse_args()
    try:
        mutations = load(ROOT / "tools" / "mutations.toml", args.only)
        check_texts(mutations)
        with tempfile.TemporaryDirectory(prefix="mutate-cache-") as cache:
            verdicts = run(mutations, args.jobs, Path(cache), Log(args.log))
    except BadMutation as error:
        print(f"mutate: {error}", file=sys.stderr)
        return 2
    killed = sum(verdict.killed for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} faults noticed ({killed / len(verdicts):.1%})")
    for verdict in verdicts:
        if not verdict.killed:
            print(f"survived: {verdict.mutation.name}: {verdict.mutation.why}")
    return 0 if killed >= NEEDED * len(verdicts) else 1


def load(path: Path, only: Iterable[str] = ()) -> list[Mutation]:
    entries = tomllib.loads(path.read_text())
    groups = {name: tuple(tests) for name, tests in entries["tests"].items()}
    mutations = [
        Mutation(**(entry | {"tests": groups[entry["tests"]]})) for entry in entries["mutation"]
    ]
    names = [mutation.name for mutation in mutations]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise BadMutation(f"two faults have the name {sorted(doubled)}")
    if unknown := set(only) - set(names):
        raise BadMutation(f"no fault has the name {sorted(unknown)}")
    return [mutation for mutation in mutations if not only or mutation.name in only]


def check_texts(mutations: list[Mutation]) -> None:
    """Raises BadMutation naming every fault whose text is not in its file exactly once."""
    lost = []
    for mutation in mutations:
        count = (ROOT / mutation.file).read_text().count(mutation.find)
        if count != 1 or mutation.find == mutation.replace:
            lost.append(f"{mutation.name}: its text occurs {count} times in {mutation.file}")
    if lost:
        raise BadMutation("the list does not fit the code, update it:\n  " + "\n  ".join(lost))


class Log:
    """Verdicts of earlier runs over the same code and tests; a JSON line each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tree = _tree_hash()
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            self._known = {e["tried"]: e for e in entries if e["tree"] == self._tree}

    def find(self, tried: object) -> dict[str, Any] | None:
        return self._known.get(repr(tried))

    def keep(self, tried: object, **found: Any) -> None:
        entry = {"tree": self._tree, "tried": repr(tried), **found}
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def _tree_hash() -> str:
    """Of everything that a test may import or read."""
    found = hashlib.sha256()
    folders = ("jaxserve", "model_zoo", "pallas_kernels", "tests", "configs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in sorted(file for file in files if "__pycache__" not in file.parts):
        found.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def check_green(tests: Sequence[str], cache: Path, log: Log) -> None:
    if log.find(tests):
        return
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy_tree(Path(folder))
        done = pytest(Path(folder), tests, cache)
    if done.returncode != _GREEN:
        raise BadMutation(f"the tests are not green without a fault:\n{done.stdout[-3000:]}")
    log.keep(tests)
    print(f"green    {' '.join(tests)} ({time.monotonic() - start:.0f} s)", flush=True)


def run(mutations: list[Mutation], jobs: int, cache: Path, log: Log) -> list[Verdict]:
    """One verdict a fault, printed as it comes; group by group, each green before its faults."""
    verdicts: list[Verdict] = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for tests in dict.fromkeys(mutation.tests for mutation in mutations):
            for test in tests:
                check_green([test], cache, log)
            group = [mutation for mutation in mutations if mutation.tests == tests]
            for verdict in pool.map(lambda mutation: attempt(mutation, cache, log), group):
                verdicts.append(verdict)
                word = "noticed " if verdict.killed else "SURVIVED"
                took = f"{verdict.seconds:.0f} s"
                print(f"{word} {verdict.mutation.name} ({took}): {verdict.detail}", flush=True)
    return verdicts


def attempt(mutation: Mutation, cache: Path, log: Log) -> Verdict:
    """Raises BadMutation when pytest could not even run the tests."""
    if known := log.find(mutation):
        return Verdict(mutation, known["killed"], known["detail"], known["seconds"])
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy_tree(Path(folder))
        target = Path(folder) / mutation.file
        target.write_text(target.read_text().replace(mutation.find, mutation.replace))
        done = pytest(Path(folder), mutation.tests, cache)
    killed, detail = _judge(mutation, done)
    seconds = time.monotonic() - start
    log.keep(mutation, killed=killed, detail=detail, seconds=seconds)
    return Verdict(mutation, killed, detail, seconds)


def _judge(mutation: Mutation, done: subprocess.CompletedProcess[str]) -> tuple[bool, str]:
    if done.returncode == _GREEN:
        return False, "all tests green"
    if done.returncode == -signal.SIGXCPU:
        return True, f"still running after {CPU_S} s of processor time"
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode != _FAILED or not failed:
        raise BadMutation(f"{mutation.name}: tests did not run:\n{done.stdout[-3000:]}")
    return True, failed[0].removeprefix("FAILED ")[:150]


def copy_tree(folder: Path) -> None:
    """The files of the working tree that are the project's own."""
    keep_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder, ignore=keep_out, dirs_exist_ok=True)


def pytest(folder: Path, tests: Iterable[str], cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.run(
        ["sh", "-c", f'ulimit -t {CPU_S}; exec "$@"', "sh", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WALL_S,
    )


if __name__ == "__main__":
    sys.exit(main())
