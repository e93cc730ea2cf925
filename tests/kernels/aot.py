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

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
needs_cuda = pytest.mark.skipif(
    find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed"
)
TPUS = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore"}),
    "v5e": ("v5e:2x4", {}),
    "v5p": ("v5p:2x2x1", {}),
    "v6e": ("v6e:2x4", {}),
    "tpu7x": ("tpu7x:2x2x1", {}),
}
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""


def device(name: str) -> Any:
    """The first device of a topology."""
    from jax.experimental import topologies

    if name == "h200":
        return topologies.get_topology_desc(
            "", platform="cuda", target_config=H200, topology="1x1x1"
        ).devices[0]
    topology, options = TPUS[name]
    return topologies.get_topology_desc(topology, platform="tpu", **options).devices[0]


def compiled(function: Any, shapes: list[tuple[tuple[int, ...], Any]], target: Any, donate=()):
    """`function` of arrays, compiled for one device; a mesh tells Pallas which."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array([target]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in shapes]
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=donate)
    if target.platform == "tpu":
        return jitted.trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    with jax.default_device(target):  # which Mosaic GPU asks for its architecture
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
