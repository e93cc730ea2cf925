"""The same step on one device and on eight simulated ones: equal tokens, few collectives.

In a process of its own, since the number of devices is fixed when jax starts.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
ONE, MESHES = "1x1", ("1x8", "2x4")


def run(*arguments: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "error", "-m", "tests.sharding.eight_devices", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return run("llama", ONE, *MESHES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma2", "mixtral", "olmo2", "phi3", "qwen3", "qwen3:int8", "mixtral:int8"]
)
def test_every_kind_of_model_gives_the_tokens_of_one_device(family):
    """Windows and caps, experts, norms over all heads, joined checkpoints, norms of heads."""
    both = run(family, ONE, "1x2")
    assert both["1x2"]["tokens"] == both[ONE]["tokens"]
    assert both["1x2"]["collectives"]["backbone[16]"]["all-reduce"] >= 2


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_those_of_one_device(found, mesh):
    """Greedy, drawn with a seed, and beside others; (1, 8) has fewer kv heads than devices."""
    assert found[mesh]["tokens"] == found[ONE]["tokens"]
    np.testing.assert_allclose(found[mesh]["logprobs"], found[ONE]["logprobs"], atol=1e-4)
    assert len({tuple(tokens) for tokens in found[ONE]["tokens"]}) == 3
    assert found[mesh]["compiles"] == 0


@pytest.mark.parametrize("mesh", MESHES)
def test_devices_hold_their_share_only(found, mesh):
    tensor = int(mesh[2:])
    whole, part = found[ONE]["shard_shapes"], found[mesh]["shard_shapes"]
    split = {"embed": 0, "layers.out": 2, "layers.gate_up": 1, "layers.down": 2}
    for name, axis in split.items():
        expected = list(whole[name])
        expected[axis] //= tensor
        assert part[name] == expected, name
    copies = max(1, tensor // 2)  # two kv heads: a device has one
    assert part["kv"][2] == whole["kv"][2] * copies // tensor == 1
    assert part["layers.norm1"] == whole["layers.norm1"]
    q, kv = 8 // tensor, 2  # heads of 16
    assert part["layers.qkv"][1] == (q + kv) * 16


@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_are_where_they_are_expected(found, mesh):
    """In the layers' loop two sums; sampling moves nothing but its results."""
    for name, counts in found[mesh]["collectives"].items():
        kind = name.partition("[")[0]
        if kind == "backbone":
            split = {} if mesh == "1x8" else {"all-gather": 4, "collective-permute": 3}  # tokens
            allowed = {"all-reduce": 3} | split
        elif kind == "head":
            allowed = {"all-to-all": 1} | ({} if mesh == "1x8" else {"all-gather": 1})
        else:
            allowed = {"all-gather": 5}
        assert all(count <= allowed.get(what, 0) for what, count in counts.items()), (name, counts)
    assert found[mesh]["collectives"]["backbone[16]"]["all-reduce"] >= 2
    assert not any(found[ONE]["collectives"].values())
