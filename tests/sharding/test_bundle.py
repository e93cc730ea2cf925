"""Programs from a folder: the same results, nothing compiled, and only exactly the same program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runner import bundle, compile_cache
from jaxserve.runner.programs import CompileCounter, ProgramSpec, compile_programs, lower


def spec(factor: int) -> ProgramSpec:
    x, y = (jax.ShapeDtypeStruct((8,), jnp.float32),) * 2

    def function(x, y):
        return {"sum": factor * x + y, "first": x[:1]}

    return ProgramSpec("test", 8, "a test", function, (x, y), donate=(0,))


@pytest.fixture(autouse=True)
def no_compile_cache():
    """Another test of this process may have left one on."""
    compile_cache.enable("off", lambda line: None)


@pytest.fixture
def folder(tmp_path):
    lowered = lower(spec(2))
    assert bundle.save(tmp_path, spec(2), lowered, lowered.compile()) > 0
    return tmp_path


def run(program) -> dict:
    return program(np.arange(8, dtype=np.float32), np.ones(8, np.float32))


def test_a_stored_program_is_not_compiled_and_gives_the_same(folder):
    (expected,) = compile_programs([spec(2)])
    counter = CompileCounter()
    (found,) = compile_programs([spec(2)], stored=str(folder))
    assert counter.count == 0
    for name, array in run(expected).items():
        np.testing.assert_array_equal(run(found)[name], array)


def test_another_program_is_compiled(folder):
    counter = CompileCounter()
    (found,) = compile_programs([spec(3)], stored=str(folder))
    assert counter.count == 1
    np.testing.assert_array_equal(run(found)["sum"], 3 * np.arange(8) + 1)


def test_a_damaged_bundle_is_named(folder):
    (path,) = folder.rglob("*.bin")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=path.name):
        compile_programs([spec(2)], stored=str(folder))


def test_another_version_does_not_see_it(folder, monkeypatch):
    monkeypatch.setattr(bundle, "version", lambda name: "0.0.1")
    assert bundle.load(folder, spec(2), lower(spec(2))) is None


def test_a_program_from_the_compile_cache_is_not_stored(tmp_path):
    compile_cache.enable(str(tmp_path / "cache"), lambda line: None)
    lowered = lower(spec(2))
    with pytest.raises(RuntimeError, match="compile cache"):
        bundle.save(tmp_path, spec(2), lowered, lowered.compile())
    compile_cache.enable("off", lambda line: None)
    for _ in range(2):  # nothing of the cache is left
        lowered = lower(spec(2))
        bundle.save(tmp_path, spec(2), lowered, lowered.compile())
        jax.clear_caches()
    (found,) = compile_programs([spec(2)], stored=str(tmp_path))
    np.testing.assert_array_equal(run(found)["sum"], 2 * np.arange(8) + 1)
