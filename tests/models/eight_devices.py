"""Run as a program: weights of each format restored over eight simulated devices."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from model_zoo.weights import load_module, open_checkpoint
from model_zoo.weights.manifest import WEIGHTS, write_manifest
from model_zoo.weights.orbax import save_weights
from tests.models import weight_files as files
from tests.reference import tiny

SPECS = {
    "embed": PartitionSpec("tensor"),
    "norm": PartitionSpec(),
    "layers.norm1": PartitionSpec(),
    "layers.norm2": PartitionSpec(None, "tensor"),
    "layers.qkv": PartitionSpec(None, None, "tensor"),
    "layers.out": PartitionSpec(None, "tensor"),
    "layers.gate_up": PartitionSpec(None, None, "tensor"),
    "layers.down": PartitionSpec("data", "tensor"),
}


def main() -> None:
    assert len(jax.devices()) == 8
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    shardings = {path: NamedSharding(mesh, spec) for path, spec in SPECS.items()}
    config = files.BIG
    weights = tiny.make_weights(config, seed=1)
    expected = files.expected_params(config, weights)
    with tempfile.TemporaryDirectory() as name:
        folder = files.write_folder(Path(name) / "hf", config, weights)
        orbax = Path(name) / "orbax"
        orbax.mkdir()
        (orbax / "config.json").write_text(json.dumps(config))
        manifest = save_weights(open_checkpoint(folder), epath.Path(orbax) / WEIGHTS, None)
        write_manifest(orbax, manifest)
        for path in (folder, orbax):
            module = load_module(open_checkpoint(path), "float32", shardings)
            files.assert_same_params(files.params(module), expected)
            check(module, shardings)
            check_int8(open_checkpoint(path), shardings)
    sys.stdout.write("ok\n")


def check(module, shardings) -> None:
    """Every parameter lies as asked, each device holding its own part only."""
    for path, sharding in shardings.items():
        array = module
        for part in path.split("."):
            array = getattr(array, part)
        array = array.get_value()
        assert array.sharding == sharding, path
        whole = np.asarray(array)
        for shard in array.addressable_shards:
            assert shard.data.shape == sharding.shard_shape(array.shape), path
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def check_int8(checkpoint, shardings) -> None:
    """A row that lies on several devices has one scale: that of the row whole."""
    scales = {
        f"{path}_scale": NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1]))
        for path, sharding in shardings.items()
        if "norm" not in path
    }
    split = load_module(checkpoint, "float32", shardings | scales, int8=True)
    check(split, shardings | scales)
    whole = load_module(checkpoint, "float32", int8=True)
    files.assert_same_params(files.params(split), files.params(whole))


if __name__ == "__main__":
    main()
