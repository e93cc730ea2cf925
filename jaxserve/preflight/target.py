"""What to compile for: `v5e:2x4`, `h200`, `h200:4`, `cpu`; chips and their figures (`chips.json`).

No jax here but in `devices`, which runs in a child process.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
from importlib import resources
from typing import Any

_DEFAULT_TOPOLOGY = {"v4": "2x2x1", "v5e": "1x1", "v5p": "2x2x1", "v6e": "1x1", "tpu7x": "2x2x1"}
_COMPILERS = {"tpu": ("libtpu", "tpu"), "cuda": ("jax_cuda13_plugin", "cuda")}


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of chip, and how many of them in which arrangement."""

    chip: str  # a key of chips.json, or cpu
    topology: str = ""  # 2x4; of a GPU the number of them; "" for the cpu

    def __str__(self) -> str:
        return f"{self.chip}:{self.topology}" if self.topology else self.chip

    @property
    def figures(self) -> dict[str, Any]:
        """The chip's entry of chips.json; {} for the cpu, whose figures nobody knows."""
        return chips().get(self.chip, {})

    @property
    def platform(self) -> str:
        """Of lowering: tpu, cuda or cpu."""
        return self.figures.get("platform", "cpu")


@functools.cache
def chips() -> dict[str, Any]:
    text = resources.files("jaxserve.preflight").joinpath("chips.json").read_text("utf-8")
    return {name: entry for name, entry in json.loads(text).items() if name != "comment"}


def parse(text: str) -> Target:
    """Raises ValueError for a chip that is not known or a topology that is none."""
    chip, colon, topology = text.strip().lower().partition(":")
    if chip == "cpu" and not colon:
        return Target("cpu")
    if chip not in chips():
        raise ValueError(f"target {text!r} is not known; known: {', '.join([*chips(), 'cpu'])}")
    if chips()[chip]["platform"] == "cuda":
        if colon and not re.fullmatch(r"[1-8]", topology):
            raise ValueError(f"target {text!r}: write {chip} or {chip}:N with 1 to 8 GPUs")
        return Target(chip, topology or "1")
    if colon and not re.fullmatch(r"\d{1,3}x\d{1,3}(x\d{1,3})?", topology):
        raise ValueError(f"target {text!r}: write the topology as 2x4, or 2x2x2 for v4, v5p, tpu7x")
    topology = topology or _DEFAULT_TOPOLOGY[chip]
    if chip in ("v4", "v5p", "tpu7x") and topology.count("x") == 1:
        topology += "x1"
    if 0 in map(int, topology.split("x")):
        raise ValueError(f"target {text!r}: a topology has no axis of 0 chips")
    return Target(chip, topology)


def num_devices(target: Target) -> int:
    """Devices as JAX counts them; 0 for the cpu, which is divided as the config asks."""
    if not target.topology:
        return 0
    chips = math.prod(map(int, target.topology.split("x")))
    return 2 * chips if target.chip == "tpu7x" else chips


def missing_compiler(target: Target) -> str | None:
    """One line on what to install; None when the target can be compiled for here."""
    if target.platform not in _COMPILERS:
        return None
    module, extra = _COMPILERS[target.platform]
    if importlib.util.find_spec(module) is not None:
        return None
    return (
        f"target {target} needs a compiler that is not installed ({module}); "
        f"install it with: pip install 'jaxserve[{extra}]'"
    )


def set_environment(target: Target, devices: int) -> None:
    """Before jax is imported: it must not look for devices, and the CPU is divided by a flag."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no look-ups on the metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else two processes race for a lock
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if target.chip == "cpu" and devices > 1:
        flag = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def devices(target: Target) -> list[Any]:
    """The target's devices: descriptions to compile for, of which none need be here."""
    import jax
    from jax.experimental import topologies

    figures = target.figures
    if target.chip == "cpu":
        return jax.devices("cpu")
    if target.platform == "tpu":
        axes, options = target.topology.split("x"), figures.get("options", {})
        if set(axes) == {"1"}:  # some versions of libtpu know no single chip, so: of the least host
            axes = ["2", "2", *axes[2:]]
        name = f"{target.chip}:{'x'.join(axes)}"
        found = topologies.get_topology_desc(name, platform="tpu", **options).devices
        return list(found[: num_devices(target)])
    config = _gpu_config(figures)
    topology = f"1x1x{target.topology}"
    described = topologies.get_topology_desc(
        "", platform="cuda", target_config=config, topology=topology
    )
    return list(described.devices)


def _gpu_config(chip: dict[str, Any]) -> str:
    """XLA's description of a GPU (stream_executor's GpuTargetConfigProto, as text)."""
    major, minor = chip["cc"]
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        shared_memory_per_block: 49152 shared_memory_per_block_optin: {chip["smem_optin"]}
        shared_memory_per_core: {chip["smem_sm"]} core_count: {chip["sms"]} fpus_per_core: 128
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: {int(chip["bandwidth_gbs"] * 1e9)}
        l2_cache_size: {chip["l2_mib"] << 20} clock_rate_ghz: {chip["clock_ghz"]}
        device_memory_size: {int(chip["hbm_gib"] * (1 << 30))}
        cuda_compute_capability {{ major: {major} minor: {minor} }}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{chip["kind"]}" """
