"""Programs of earlier starts: taken as they are where nothing differs, and never where it does."""

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.runner import compile_cache, program_store, programs
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.programs import CompileCounter, Program, ProgramSpec, compile_programs


def part(kind: str, factor: int) -> ProgramSpec:
    x, y = (jax.ShapeDtypeStruct((8,), jnp.float32),) * 2

    def function(x, y):
        return {"sum": factor * x + y, "first": x[:1]}

    return ProgramSpec(kind, 8, "a test", function, (x, y), donate=(0,))


def spec(factor: int) -> ProgramSpec:
    """Of two parts, as the layers of a CPU are."""
    parts = (part("one", factor), part("two", factor + 1))
    return ProgramSpec("both", 8, "a test", lambda one, two: Both(one, two), (), parts=parts)


class Both:
    def __init__(self, *parts) -> None:
        self._parts = parts

    def __call__(self, x, y) -> list[dict]:
        return [part(jnp.array(x), y) for part in self._parts]  # the first is donated


@pytest.fixture(autouse=True)
def no_compile_cache():
    """Another test of this process may have left one on."""
    compile_cache.enable("off", lambda line: None)
    yield
    compile_cache.enable("off", lambda line: None)


def start(folder: Path, factor: int, facts: str = "a", environment: str = "here") -> Program:
    def fail(line: str) -> None:
        raise AssertionError(line)

    store = ProgramStore(folder, facts, fail, environment=environment)
    (program,) = compile_programs([spec(factor)], store=store)
    return program


def check(program: Program, factor: int) -> None:
    x, y = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    for more, found in enumerate(program(x, y)):
        np.testing.assert_array_equal(found["sum"], (factor + more) * x + y)
        np.testing.assert_array_equal(found["first"], x[:1])


def test_the_same_start_lowers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check(start(tmp_path, 2), 2)
    monkeypatch.setattr(programs, "lower", lambda spec: pytest.fail(f"{spec.name} is lowered"))
    counter = CompileCounter()
    check(start(tmp_path, 2), 2)
    assert counter.count == 0


def test_other_facts_lower_but_do_not_compile_what_is_the_same(tmp_path: Path):
    start(tmp_path, 2)
    counter = CompileCounter()
    program = start(tmp_path, 2, facts="b")
    assert counter.count == 0
    check(program, 2)
    program = start(tmp_path, 3, facts="c")
    assert counter.count == 2
    check(program, 3)


def test_another_environment_sees_nothing(tmp_path: Path):
    start(tmp_path, 2)
    counter = CompileCounter()
    check(start(tmp_path, 2, environment="there"), 2)
    assert counter.count == 2


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b[:99] + b"?" + b[100:], lambda b: b""]
)
def test_what_is_damaged_is_compiled_again(tmp_path: Path, damage):
    start(tmp_path, 2)
    for path in tmp_path.rglob("*.bin"):
        path.write_bytes(damage(path.read_bytes()))
    counter = CompileCounter()
    check(start(tmp_path, 2), 2)
    assert counter.count == 2
    check(start(tmp_path, 2), 2)
    assert counter.count == 2, "it was not mended"


@pytest.mark.parametrize("text", ["", "[]", '{"one[8]": "gone.bin"}'])
def test_a_damaged_index_only_costs_time(tmp_path: Path, text: str):
    start(tmp_path, 2)
    (index,) = tmp_path.rglob("start-*.json")
    index.write_text(text)
    counter = CompileCounter()
    check(start(tmp_path, 2), 2)
    assert counter.count == 0


def test_where_nothing_can_be_written_one_warning_says_so(tmp_path: Path):
    folder = tmp_path / "file"
    folder.write_text("")
    heard: list[str] = []
    store = ProgramStore(folder, "a", heard.append, environment="here")
    (program,) = compile_programs([spec(2)], store=store)
    check(program, 2)
    assert len(heard) == 1 and str(folder) in heard[0]


def test_a_program_that_jax_has_cached_is_compiled_to_be_stored(tmp_path: Path):
    """Read from JAX's cache it could not be stored: XLA leaves its functions out, and says so only
    when it is loaded."""
    folder = compile_cache.enable(str(tmp_path / "cache"), lambda line: None)
    compile_programs([spec(2)])
    jax.clear_caches()
    check(start(tmp_path / "store", 2), 2)
    counter = CompileCounter()
    check(start(tmp_path / "store", 2), 2)
    assert counter.count == 0
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_facts_are_code_settings_and_model(tmp_path: Path):
    step = SimpleNamespace(config=EngineConfig(), model_config="llama", vocab_size=9)
    facts = program_store.facts_of(step)
    seats = EngineConfig(scheduler=SchedulerConfig(max_seqs=3))
    for other in ({"vocab_size": 8}, {"model_config": "gemma"}, {"config": seats}):
        assert facts != program_store.facts_of(SimpleNamespace(**{**vars(step), **other}))
    assert facts == program_store.facts_of(step)
    digests: list[str] = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (tmp_path / "a.py").write_text(text)
        digests.append(program_store._digest_of(tmp_path))
    assert digests[0] == digests[2] != digests[1]


def test_the_environment_has_what_compiles(monkeypatch: pytest.MonkeyPatch):
    here = program_store.environment_here()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert program_store.environment_here() != here
    monkeypatch.undo()
    monkeypatch.setattr(program_store, "_processor", functools.partial(str, "flags: less"))
    assert program_store.environment_here() != here
