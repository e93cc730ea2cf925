"""Compiles for a device that is not there, in a child process: compilers may abort."""

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jaxserve.preflight import target

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
needs_cuda = pytest.mark.skipif(
    find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed"
)
TPUS = {"v4": "v4", "v5e": "v5e:2x4", "v5p": "v5p", "v6e": "v6e:2x4", "tpu7x": "tpu7x"}


def device(name: str) -> Any:
    """The first device of a topology: a key of TPUS, or a GPU's name."""
    return target.devices(target.parse(TPUS.get(name, name)))[0]


def compiled(function: Any, shapes: list[tuple[tuple[int, ...], Any]], chip: Any, donate=()):
    """`function` of arrays, compiled for one device; a mesh tells Pallas which."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array([chip]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in shapes]
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=donate)
    if chip.platform == "tpu":
        return jitted.trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    with jax.default_device(chip):  # which Mosaic GPU asks for its architecture
        return jitted.trace(*arrays).lower(lowering_platforms=("cuda",)).compile()


def child(code: str, **environment: str) -> Any:
    """What the code gives `print(json.dumps(...))` as its last line."""
    root = Path(__file__).parent.parent.parent
    known = {
        "JAX_PLATFORMS": "cpu",  # no plugin opens a device
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, **known, **environment},
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])
