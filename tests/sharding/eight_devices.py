"""Run as a program: one model on one device and on meshes of eight simulated ones; prints JSON."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# Programs of eight devices compile for long; how fast they run does not matter here.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)

from jaxserve.build import Assembly, assemble
from jaxserve.config import (
    BucketConfig,
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    RunnerConfig,
    SamplingConfig,
    SchedulerConfig,
)
from jaxserve.engine import Engine, ModelLimits
from jaxserve.request import SamplingParams
from tests.equivalence.rig import EOS, generate, write_tokenizer
from tests.models.weight_files import write_folder
from tests.reference import tiny

CONFIG = tiny._with(num_attention_heads=8, num_key_value_heads=2, attention_bias=True)
CHECKPOINTS = Path(__file__).parent.parent / "families" / "checkpoints"
OPTIONS = (
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, seed=7, max_tokens=10, ignore_eos=True, top_k=20),
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
)
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def main(arguments: list[str]) -> None:
    family, *texts = arguments
    family, _, quantize = family.partition(":")
    meshes = [tuple(map(int, text.split("x"))) for text in texts]
    with tempfile.TemporaryDirectory() as name:
        if family == "llama":
            folder = write_folder(Path(name), CONFIG, tiny.make_weights(CONFIG, seed=3))
        else:
            folder = shutil.copytree(CHECKPOINTS / family, name, dirs_exist_ok=True)
            folder = Path(folder)
        write_tokenizer(folder)
        found = {f"{data}x{tensor}": run(folder, data, tensor, quantize) for data, tensor in meshes}
    sys.stdout.write(json.dumps(found) + "\n")


def run(folder: Path, data: int, tensor: int, quantize: str) -> dict[str, Any]:
    config = EngineConfig(
        model=ModelConfig(
            name=str(folder), dtype="float32", quantize=quantize or "none", max_len=64
        ),
        cache=CacheConfig(block_size=8, num_blocks=48),
        scheduler=SchedulerConfig(token_budget=16, max_seqs=8, watermark=0.0),
        buckets=BucketConfig(tokens=(16,), rows=(8,)),
        sampling=SamplingConfig(penalties=False),
        runner=RunnerConfig(compile_cache="off", layers="loop"),
        mesh=MeshConfig(data=data, tensor=tensor),
    )
    assembly = assemble(config)
    try:
        limits = ModelLimits(tiny.VOCAB, frozenset({EOS}), assembly.engine.limits.windows)
        engine = Engine(assembly.config, assembly.runner, limits)
        prompts = [tiny.make_prompt(length, length) for length in (5, 23, 11)]
        answers = generate(engine, prompts, OPTIONS)
        return {
            "tokens": [answer.tokens for answer in answers],
            "logprobs": [entry.logprob for entry in answers[0].logprobs],
            "compiles": assembly.runner.compiles_after_warmup,
            "collectives": collectives(assembly),
            "shard_shapes": shard_shapes(assembly),
        }
    finally:
        assembly.close()


def collectives(assembly: Assembly) -> dict[str, dict[str, int]]:
    """Collective operations of each program, as compiled."""
    return {
        program.spec.name: Counter(COLLECTIVE.findall(program.compiled.as_text()))
        for program in assembly.runner.manifest
    }


def shard_shapes(assembly: Assembly) -> dict[str, list[int]]:
    """What a device holds of some arrays."""
    from flax import nnx

    leaves = {
        ".".join(map(str, path)): leaf.get_value()
        for path, leaf in nnx.to_flat_state(assembly.runner.weights)
    }
    leaves |= {"kv": assembly.runner.state.kv, "hidden": assembly.runner.state.hidden}
    return {name: list(a.addressable_shards[0].data.shape) for name, a in leaves.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
