"""A model under a config on devices that need not be here: shapes, sizes and programs."""

import dataclasses
import math
from typing import Any

import jax

from jaxserve import build
from jaxserve.config import EngineConfig
from jaxserve.preflight.child import largest_prime
from jaxserve.preflight.target import Target
from jaxserve.runner.device_step import DeviceStep
from jaxserve.runner.memory import GIB, HEADROOM
from jaxserve.runner.programs import ProgramSpec
from jaxserve.runner.sharding import ONE_DEVICE, Sharding, device_bytes
from model_zoo import partition

_FEW = 1009  # blocks of a pool whose size says nothing
_SCRATCH_GUESS = GIB  # of the programs, before they have been compiled


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is to be compiled, and what it takes on one device."""

    step: DeviceStep
    config: EngineConfig  # resolved
    asked_blocks: int  # of the KV pool, by the config; 0: as many as fit
    weight_bytes: int
    block_bytes: int
    state_bytes: int  # arrays between steps, without the KV
    notes: list[str]  # what a start would log

    @property
    def num_blocks(self) -> int:
        return self.step.num_blocks

    def programs(self) -> list[ProgramSpec]:
        """Every program that is compiled; of a chain its parts."""
        return [part for spec in self.step.specs() for part in spec.parts or (spec,)]

    def weight_shapes(self) -> list[tuple[int, ...]]:
        """Each large weight, what a device holds of it, and one layer of both."""
        found: list[tuple[int, ...]] = []
        for leaf in jax.tree.leaves(self.step.abstract_weights):
            shard = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
            if math.prod(shard) * leaf.dtype.itemsize < 1 << 20:
                continue
            for shape in (leaf.shape, shard):
                found += [shape, shape[1:]] if len(shape) > 2 else [shape]
        return found

    def facts(self) -> dict[str, Any]:
        c, config = self.step.model_config, self.config
        return {
            "programs": [spec.name for spec in self.programs()],
            "weight_bytes": self.weight_bytes,
            "block_bytes": self.block_bytes,
            "state_bytes": self.state_bytes,
            "num_blocks": self.num_blocks,
            "asked_blocks": self.asked_blocks,
            "block_size": config.cache.block_size,
            "windows": list(c.kv_layout.windows),
            "max_chunk": config.max_chunk,
            "max_len": config.model.max_len,
            "max_seqs": config.scheduler.max_seqs,
            "token_budget": config.scheduler.token_budget,
            "token_buckets": list(config.buckets.tokens),
            "dtype": config.model.dtype,
            "kv_dtype": config.cache.dtype,
            "data": config.mesh.data,
            "tensor": config.mesh.tensor,
            "notes": self.notes,
            "model": {name: getattr(c, name) for name in "LDFNKHV"}
            | {"tie": bool(c.tie), "windows": list(c.windows)},
        }


def make_plan(
    config: EngineConfig,
    hf: dict[str, Any],
    devices: list[Any],
    target: Target,
    num_blocks: int = 0,
    *,
    exact: bool = False,
) -> Plan:
    """Raises ValueError when model, config and devices do not go together.

    `num_blocks` 0: what the config asks for, else what the device's memory should hold.  Unless
    `exact`, programs are compiled with the next lower prime, so that the KV can be told from all
    else.
    """
    used = config.mesh.data * config.mesh.tensor
    if target.topology and used != len(devices):
        raise ValueError(
            f"mesh.data={config.mesh.data} x mesh.tensor={config.mesh.tensor} uses {used} devices, "
            f"target {target} has {len(devices)}; set mesh.tensor and mesh.data to match"
        )
    sharding = ONE_DEVICE  # as the engine has it
    if used > 1 or target.chip != "cpu":  # which chip is said by a mesh alone
        sharding = Sharding(partition.make_mesh(devices, config.mesh.data, config.mesh.tensor))
    notes: list[str] = []
    config = build.with_kernels(config, sharding, notes.append)
    first = _with_blocks(config, hf, sharding, _FEW)
    block_bytes = first.block_bytes
    asked = config.cache.num_blocks or int(config.cache.memory_gib * GIB) // block_bytes
    if not num_blocks:
        num_blocks = asked or _guess(target, first.weight_bytes, block_bytes)
    num_blocks = num_blocks if exact else largest_prime(max(3, num_blocks))
    made = _with_blocks(config, hf, sharding, num_blocks)
    step = made.step()
    state = {name: leaf for name, leaf in step.abstract_state().items() if name != "kv"}
    size = device_bytes(state)
    return Plan(step, made.config, asked, made.weight_bytes, block_bytes, size, notes)


def _with_blocks(
    config: EngineConfig, hf: dict[str, Any], sharding: Sharding, num_blocks: int
) -> build.Plan:
    cache = dataclasses.replace(config.cache, num_blocks=num_blocks)
    return build.plan(dataclasses.replace(config, cache=cache), hf, sharding=sharding)


def _guess(target: Target, weight_bytes: int, block_bytes: int) -> int:
    """Blocks that should fit; a small pool when even the weights do not."""
    memory = target.figures.get("hbm_gib", 0) * GIB * HEADROOM
    free = memory - weight_bytes - _SCRATCH_GUESS if memory else 2 * GIB
    return max(int(free) // block_bytes, _FEW)
