"""A program of its own: starts `jaxserve batch` with the fake model in a fork, kills it after a
random time, again and again; the last time it may finish.

python -m tests.cli.killer SEED KILLS batch IN --output OUT ...
Prints the sizes of the output after each kill, and exits as the last run did.  How long a run may
live follows from whether the last ones got anywhere, so that a busy machine is no other test.
"""

import contextlib
import os
import random
import signal
import sys
import time
import types
from pathlib import Path

import jaxserve.offline.files
import jaxserve.offline.job
import jaxserve.offline.places
import jaxserve.offline.reader  # noqa: F401  all of it before the first fork
from jaxserve import sources
from jaxserve.cli.main import main
from tests.cli import fakes

STEP_SECONDS = 0.002
LONGEST = 0.1  # seconds that the first run may live


def install() -> None:
    build = types.ModuleType("jaxserve.build")
    build.assemble = fakes.assemble  # type: ignore[attr-defined]
    sys.modules["jaxserve.build"] = build
    sources.resolve = lambda name, **_: Path(fakes.__file__)  # type: ignore[assignment]
    dispatch = fakes.FakeRunner.dispatch

    def slow(self: fakes.FakeRunner, batch: object) -> object:
        time.sleep(STEP_SECONDS)
        return dispatch(self, batch)  # type: ignore[arg-type]

    fakes.FakeRunner.dispatch = slow  # type: ignore[method-assign,assignment]


def start(argv: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        with contextlib.suppress(BaseException):
            code = main(argv)
    finally:
        os._exit(code)


def kill_again_and_again(seed: int, kills: int, argv: list[str]) -> int:
    rng = random.Random(seed)
    output = Path(argv[argv.index("--output") + 1])
    sizes: list[int] = []
    longest = LONGEST
    while len(sizes) < kills:
        pid = start(argv)
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            sys.stderr.write("it finished before the kills were done\n")
            return 71
        sizes.append(output.stat().st_size if output.exists() else 0)
        longest *= 0.8 if sizes[-1] > max(sizes[:-1], default=0) else 1.3
    sys.stdout.write(" ".join(map(str, sizes)))
    _, status = os.waitpid(start(argv), 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    install()
    sys.exit(kill_again_and_again(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
