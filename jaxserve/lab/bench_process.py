"""`jaxserve bench` in a process of its own, for one run of a comparison."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.lab.compare import Run, RunFailed, Variant, load_run

COMMAND = (sys.executable, "-m", "jaxserve.cli.main")


class Processes:
    """Runs variants one after the other.

    `folder` is for traces and compile caches.  With `cold` each variant has a cache of its own, so
    that its first run compiles everything; without, the settings' cache is used.  `options` are
    given to every run.
    """

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        *,
        cold: bool,
        timeout_s: float | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._folder = folder
        self._options = tuple(options)
        self._cold = cold
        self._timeout_s = timeout_s
        self._command = tuple(command)
        self._places: dict[str, Path] = {}

    def trace_of(self, variant: Variant, number: int) -> Path:
        return self._place(variant) / f"round-{number}.trace"

    def run(self, variant: Variant, number: int) -> Run:
        """Raises RunFailed with the process's last line."""
        record = self.trace_of(variant, number)
        cache: tuple[str, ...] = ()
        is_first = self._cold and not (self._place(variant) / "cache").exists()
        if self._cold:
            (self._place(variant) / "cache").mkdir(exist_ok=True)
            cache = ("--set", f"runner.compile_cache={self._place(variant) / 'cache'}")
        words = [*self._command, "bench", "--json", "--record", str(record)]
        words += [*self._options, *variant.options, *cache]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=self._timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"it was ended after {self._timeout_s:g} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RunFailed(lines[-1])
        return load_run(done.stdout, record, cold=is_first)

    def _place(self, variant: Variant) -> Path:
        if variant.name not in self._places:
            place = self._folder / f"config-{len(self._places) + 1}"
            place.mkdir(parents=True, exist_ok=True)
            self._places[variant.name] = place
        return self._places[variant.name]
