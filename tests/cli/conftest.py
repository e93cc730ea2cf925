"""`jaxserve` with the fake assembly in place of the model."""

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxserve import sources
from jaxserve.cli.main import main
from tests.cli import fakes
from tests.cli.files import Files


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def assembled(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[fakes.FakeAssembly]]:
    """Every assembly that a command made; `jaxserve.build` is a stand-in, so jax stays out."""
    made: list[fakes.FakeAssembly] = []

    def assemble(*args: object, **options: object) -> fakes.FakeAssembly:
        made.append(fakes.assemble(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    build = types.ModuleType("jaxserve.build")
    build.assemble = assemble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.build", build)
    model = tmp_path_factory.mktemp("model") / "fake.gguf"
    model.write_bytes(b"weights")
    monkeypatch.setattr("jaxserve.sources.resolve", lambda name, **_: model)
    yield made


@pytest.fixture
def jaxserve(
    assembled: list[fakes.FakeAssembly],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Ran]:
    """Runs the command line in this process; the default model is not on this machine."""
    monkeypatch.setattr(sources, "local", lambda name: None)

    def run(*argv: object) -> Ran:
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def run(jaxserve, files: Files):
    return lambda *more: jaxserve("batch", files.input, "--output", files.output, *more)
