"""Parts of the runner that need no model: packing, pool size, compile cache, manifest."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runner import compile_cache, memory, packing
from jaxserve.runner.programs import CompileCounter, Manifest, ProgramSpec, compile_programs

GIB = 1 << 30


@pytest.mark.parametrize("rows", [1, 8, 13])
def test_packing_gives_back_every_bit(rows):
    rng = np.random.default_rng(rows)
    spec = packing.sample_spec(rows)
    given = type(spec)(
        *(
            rng.integers(0, 2, leaf.shape).astype(bool)
            if leaf.dtype == bool
            else rng.integers(0, 2**32, leaf.shape, dtype=np.uint32).view(leaf.dtype)
            for leaf in spec
        )
    )
    packed = packing.pack(given)
    assert packed.shape == (packing.packed_length(spec),)
    found = jax.jit(lambda buffer: packing.unpack(buffer, spec))(packed)
    for before, after in zip(given, found, strict=True):
        after = np.asarray(after)
        assert before.dtype == after.dtype
        assert before.tobytes() == after.tobytes()


def test_pool_is_what_weights_and_programs_leave():
    gib = memory.pool_gib(16 * GIB, weight_bytes=4 * GIB, measure_scratch=lambda: 2 * GIB)
    assert 4 * GIB + 2 * GIB + gib * GIB <= 16 * GIB
    assert gib > 8


def test_b24_pool_measures_programs_first_and_says_what_to_change():
    with pytest.raises(ValueError, match="scheduler.token_budget"):
        memory.pool_gib(GIB, GIB // 2, lambda: GIB)


def spec(bucket: int) -> ProgramSpec:
    x = jax.ShapeDtypeStruct((bucket,), jnp.float32)
    return ProgramSpec("double", bucket, "a test", lambda x: 2 * x, (x,), donate=(0,))


def test_programs_compile_once_and_never_again():
    counter = CompileCounter()
    programs = compile_programs([spec(4), spec(16)])
    assert counter.count == 2
    manifest = Manifest(programs)
    counter.reset()
    assert manifest.buckets("double") == (4, 16) and manifest.buckets("other") == ()
    for _ in range(3):
        out = manifest.get("double", 4)(jnp.ones(4))
    assert out.tolist() == [2, 2, 2, 2]
    assert manifest.get("double", 4).uses == 3
    counter.reset()  # jnp.ones compiled
    with pytest.raises(KeyError, match=r"double\[5\].*\(4, 16\)"):
        manifest.get("double", 5)
    with pytest.raises(TypeError):
        manifest.get("double", 4)(np.ones(5, np.float32))
    assert counter.count == 0
    row = manifest.table()[0]
    assert row["program"] == "double[4]" and row["aliased"] == 16


CACHE_SCRIPT = """
import sys
from pathlib import Path
from jaxserve.runner import compile_cache
warnings = []
folder = compile_cache.enable(sys.argv[1], warnings.append)
import jax, jax.numpy as jnp
assert jax.jit(lambda x: jnp.sin(x) * 3)(jnp.arange(4.0)).shape == (4,)
print("FOLDER", folder)
print("WARNINGS", len(warnings), *warnings)
"""


def start(setting: str) -> subprocess.CompletedProcess:
    run = subprocess.run(
        [sys.executable, "-c", CACHE_SCRIPT, setting], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    return run


def test_b26_compile_cache_is_filled_and_survives_damage(tmp_path):
    start(str(tmp_path))
    entries = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert entries, "nothing was cached"
    assert jax.__version__ in str(entries[0])
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:10])
    assert "WARNINGS 0" in start(str(tmp_path)).stdout


def test_b26_unusable_compile_cache_is_a_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    out = start(str(blocked)).stdout
    assert "FOLDER None" in out and "WARNINGS 1" in out and str(blocked) in out


def test_compile_cache_off_writes_nothing():
    assert compile_cache.enable("off", lambda line: None) is None
