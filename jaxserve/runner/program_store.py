"""Compiled programs of earlier starts, found without tracing a function.

To trace and lower programs takes longer than to load them: 8 of 10 seconds for the default model.
So a start names everything that its programs are made of: `facts` (code, settings, model) that
make what is lowered, and an environment (versions, flags, processor) that compiles it.  A later
start that names the same takes the programs as they are.  Where only the facts differ, programs are
lowered, and found by what they are lowered to.  They are trusted as code is.
"""

import functools
import hashlib
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxserve.runner import bundle

_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS")
_PACKAGES = ("jaxserve", "model_zoo", "pallas_kernels")


class ProgramStore:
    """Programs in a folder of their environment in `root`.  `warn` hears once why nothing can be
    kept.  May be shared by processes: files appear whole."""

    def __init__(
        self, root: Path, facts: Any, warn: Callable[[str], None], *, environment: Any = None
    ) -> None:
        self._folder = root / _name_of(environment or environment_here())
        self._index = self._folder / f"start-{_name_of(facts)}.json"
        self._warn: Callable[[str], None] | None = warn
        self._known = self._read_index()
        self._found: dict[str, str] = {}  # program -> file, of this start

    def has(self, spec: Any) -> bool:
        """A start of the same facts has kept this program."""
        return spec.name in self._known

    def load(self, spec: Any) -> Any | None:
        """The program that a start of the same facts has kept; None when it cannot be read."""
        return self._load(spec, self._known.get(spec.name, ""))

    def find(self, spec: Any, lowered: Any) -> Any | None:
        """The program of any start that was lowered to the same."""
        return self._load(spec, bundle.name_of(spec, lowered))

    def keep(self, spec: Any, lowered: Any, compiled: Any) -> None:
        """Stores a program that was compiled here."""
        name = bundle.name_of(spec, lowered)
        try:
            bundle.write(self._folder / name, bundle.pack(compiled))
        except Exception as error:  # of the disk or of XLA: serving goes on without
            self._give_up(error)
        else:
            self._found[spec.name] = name

    def close(self) -> None:
        """Notes what this start has used, for the next of the same facts."""
        if self._found.items() <= self._known.items():
            return
        try:
            bundle.write(self._index, json.dumps(self._known | self._found).encode())
        except OSError as error:
            self._give_up(error)

    def _load(self, spec: Any, name: str) -> Any | None:
        try:
            found = bundle.unpack((self._folder / name).read_bytes(), spec)
        except Exception:  # whatever is wrong with it, it is compiled again
            return None
        self._found[spec.name] = name
        return found

    def _read_index(self) -> dict[str, str]:
        try:
            known = json.loads(self._index.read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _give_up(self, error: Exception) -> None:
        warn, self._warn = self._warn, None
        if warn is not None:
            warn(f"programs are not kept in {self._folder}: {error}")


def facts_of(step: Any) -> list[Any]:
    """All that the programs of a `DeviceStep` are traced from."""
    return [sources(), repr(step.config), repr(step.model_config), step.vocab_size]


def environment_here() -> list[Any]:
    """All that compiles for this machine's first device depend on, beside what is lowered."""
    device = jax.devices()[0]
    return [
        platform.python_version(),
        [version(name) for name in _LIBRARIES],
        [os.environ.get(name) for name in _VARIABLES],
        sorted((k, repr(v)) for k, v in jax.config.values.items() if "cache" not in k),
        [device.platform, device.device_kind, os.cpu_count(), _processor()],
    ]


def _name_of(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


@functools.cache
def sources() -> list[str]:
    """The code that programs are traced from."""
    root = Path(__file__).parents[2]
    return [_digest_of(root / package) for package in _PACKAGES]


def _digest_of(package: Path) -> str:
    """Of its code and of the data files beside it."""
    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".json")):
        digest.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """What the processor can do: code for another may not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
