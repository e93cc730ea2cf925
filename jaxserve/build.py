"""The only place that assembles: a config becomes weights, runner and engine."""

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxserve
from jaxserve import sources
from jaxserve.batch.buckets import resolve
from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel
from jaxserve.engine import Engine, ModelLimits
from jaxserve.lab import cost_table
from jaxserve.metrics import StepRecord
from jaxserve.runner import (
    allocator,
    compile_cache,
    compile_watch,
    memory,
    program_store,
    warmup,
)
from jaxserve.runner.device_step import DeviceStep
from jaxserve.runner.dtypes import default_dtype
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.programs import all_known, compile_programs
from jaxserve.runner.sharding import ONE_DEVICE, Sharding, device_bytes
from jaxserve.runner.sharding import make as make_sharding
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from model_zoo import registry
from model_zoo.parameters import with_int8
from model_zoo.partition import kv_copies
from model_zoo.weights import load_module, open_checkpoint
from model_zoo.weights.fill import with_kv_copies
from pallas_kernels.ragged_paged_attention.api import kv_shape, unsupported_device

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A ready engine and what it was made of."""

    engine: Engine
    runner: ModelRunner
    tokenizer: Tokenizer
    config: EngineConfig  # resolved: nothing is left to derive
    startup: dict[str, float]  # seconds of each part of the start; parts may overlap
    cost_facts: dict[str, Any]  # all that step times depend on
    cost_file: Path | None  # where `lab profile` keeps the costs of these facts; None: nowhere

    def close(self) -> None:
        self.runner.close()


def assemble(
    config: EngineConfig,
    *,
    on_step: Callable[[StepRecord], None] | None = None,
    on_compile: Callable[[int], None] = lambda count: None,
    log: Log = lambda line: None,
) -> Assembly:
    """Loads the model that `config` names and makes every program ready to serve.

    `on_compile` hears how many programs had to be compiled so far, in the thread that compiled;
    never in a start that finds all of them in the compile cache.

    Raises ValueError or OSError with one clear line when model and config do not go together,
    before anything is compiled; `warmup.ProofError` when a program does not give the right answers.
    """
    with compile_watch.watch(on_compile):
        return _assemble(config, on_step, log)


def _assemble(
    config: EngineConfig, on_step: Callable[[StepRecord], None] | None, log: Log
) -> Assembly:
    timer = _Timer()
    cache = compile_cache.enable(config.runner.compile_cache, lambda line: log(f"warning: {line}"))
    if jax.default_backend() == "cpu":
        allocator.keep_scratch()
    path = sources.resolve(config.model.name)
    timer.mark("find")
    checkpoint = open_checkpoint(path)
    with ThreadPoolExecutor(2) as pool:
        loading_tokenizer = pool.submit(load_tokenizer, Path(path))
        hf_config = checkpoint.hf_config
        sharding = make_sharding(config.mesh.data, config.mesh.tensor)
        config = with_kernels(config, sharding, log)
        pool_gib = _pool_gib(config, hf_config, sharding)
        where = checkpoint.path
        made = plan(config, hf_config, pool_gib=pool_gib, where=where, sharding=sharding)
        config = made.config
        tokenizer = loading_tokenizer.result()
        vocab_size = min(tokenizer.vocab_size, made.model_config.V)
        timer.mark("read")
        step = made.step(vocab_size)
        making = pool.submit(step.init_state)
        loading = pool.submit(_load, checkpoint, made, timer)
        store = _program_store(step, cache, log)
        if store is not None:
            # To load programs and weights at once takes longer than in turn; and nothing else
            # must compile while programs do.
            wait([loading] if all_known(step.specs(), store) else [loading, making])
        runner = ModelRunner(
            step, config, threads=_compile_threads(), store=store, state=making.result
        )
        timer.mark("compile")
        runner.load(loading.result())
        timer.mark("load")
    if config.runner.prove:
        difference = warmup.prove(runner)
        log(
            f"proved {len(config.buckets.tokens)} token buckets; "
            f"largest difference {difference:.2g}"
        )
        timer.mark("prove")
    costs = warmup.warm_up(runner)
    timer.mark("warm_up")
    limits = ModelLimits(vocab_size, tokenizer.eos_ids, made.model_config.kv_layout.windows)
    engine = Engine(config, runner, limits, on_step=on_step)
    facts = cost_facts(made)
    file = None if cache is None else cache.parent / "costs" / cost_table.file_name(facts)
    if runner.agreement is None:  # each process measures its own: they would schedule differently
        engine.set_costs(stored_costs(file, log) or costs)
    return Assembly(engine, runner, tokenizer, config, timer.parts, facts, file)


def _program_store(step: DeviceStep, cache: Path | None, log: Log) -> ProgramStore | None:
    """Of a CPU alone: nobody has stored programs of other devices so, and JAX's cache has them."""
    if cache is None or step.sharding.mesh is not None or step.sharding.device.platform != "cpu":
        return None
    return ProgramStore(
        cache / "programs", program_store.facts_of(step), lambda line: log(f"warning: {line}")
    )


def cost_facts(made: "Plan") -> dict[str, Any]:
    """All that the times of steps depend on; where two starts agree in it, so do their times."""
    config, device = made.config, made.sharding.device
    c = made.model_config
    return {
        "architecture": hashlib.blake2b(repr(c).encode(), digest_size=12).hexdigest(),
        "device": f"{jax.device_count()} x {device.platform} {device.device_kind}",
        "cores": os.cpu_count() if device.platform == "cpu" else None,
        "dtype": [config.model.dtype, config.cache.dtype],
        "code": program_store.sources(),
        "versions": [jaxserve.__version__, jax.__version__, metadata.version("jaxlib")],
        "mesh": dataclasses.astuple(config.mesh),
        "buckets": [config.buckets.tokens, config.buckets.rows],
        "sampling": [config.sampling.random, config.sampling.penalties],
        "programs": [config.runner.kernels, config.runner.layers, config.runner.deterministic],
        "shapes": [config.scheduler.max_seqs, config.model.max_len, config.cache.block_size],
    }


def stored_costs(file: Path | None, log: Log) -> CostModel | None:
    """Costs that `lab profile` has measured for this very start; None where it has not."""
    if file is None or not file.exists():
        return None
    try:
        table = cost_table.load(file)
    except cost_table.CostTableError as error:
        log(f"warning: {error}; using the costs of the warm-up")
        return None
    log(f"costs from {file} ({table.source})")
    return table.costs


def with_kernels(config: EngineConfig, sharding: Sharding, log: Log) -> EngineConfig:
    """`runner.kernels` is "xla" where the devices that are compiled for have no kernels; `log`
    hears why, unless they are CPUs, for which there never are any.
    """
    device = sharding.device
    if config.runner.kernels == "xla":
        return config
    if device.platform != "cpu":
        reason = unsupported_device(device)
        if reason is None:
            return config
        log(f"runner.kernels=auto takes XLA: {reason}")
    return dataclasses.replace(config, runner=dataclasses.replace(config.runner, kernels="xla"))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a start decides before it reads a weight."""

    config: EngineConfig  # resolved: nothing is left to derive
    model_config: Any  # the family's own
    module: Any  # abstract: shapes and types, no arrays
    weight_bytes: int
    block_bytes: int  # KV of one block, in the layers of a group; both on one device
    sharding: Sharding = ONE_DEVICE
    kv_copies: int = 1  # of each kv head in the cache, see `partition.kv_copies`

    @property
    def blocks_per_row(self) -> int:
        """Width of the block table."""
        return -(-self.config.model.max_len // self.config.cache.block_size)

    def step(self, vocab_size: int | None = None) -> DeviceStep:
        """The functions that will run; its `specs()` are the programs.  `vocab_size`: the
        tokenizer's, where it has fewer ids than the model."""
        graphdef, weights = nnx.split(self.module)
        ids = self.model_config.V if vocab_size is None else vocab_size
        return DeviceStep(graphdef, weights, self.model_config, self.config, ids, self.sharding)


def plan(
    config: EngineConfig,
    hf_config: dict[str, Any],
    *,
    pool_gib: float = 0.0,
    where: Any = "",
    sharding: Sharding = ONE_DEVICE,
) -> Plan:
    """What `config` comes to with a model of this config.json; touches no file, and of
    devices only their platform.

    `pool_gib`: GiB for the KV pool where `config` names neither blocks nor memory; 0: what a CPU
    gets.  Raises ValueError when model and config do not go together, naming the model's place
    `where`.
    """
    platform = sharding.device.platform
    config = with_dtypes(config, platform)
    dtype = config.model.dtype
    asked = config.model.max_len  # what was not asked for is not stretched
    family, stored = registry.configure(hf_config, dtype, max_len=asked, where=where)
    copies = kv_copies(stored.N, stored.K, config.mesh.tensor)
    max_len = stored.longest if asked else stored.max_position
    stored = stored.served(asked or max_len)
    block_bytes = block_bytes_of(with_kv_copies(stored, copies), config)
    if pool_gib and not config.cache.memory_gib:
        cache = dataclasses.replace(config.cache, memory_gib=pool_gib)
        config = dataclasses.replace(config, cache=cache)
    single = platform == "cpu" and dtype == "float32"
    windows = stored.kv_layout.windows
    config = resolve(config, max_len, block_bytes, single=single, windows=windows)
    stored = family.config_from_hf(hf_config, dtype=dtype, max_len=config.model.max_len)
    served = with_kv_copies(stored.served(config.model.max_len), copies)
    model_config = with_int8(served, config.model.quantize == "int8")
    module = nnx.eval_shape(lambda: family.module(model_config, nnx.Rngs(0)))
    weight_bytes = device_bytes(sharding.weights(nnx.split(module)[1]))
    return Plan(config, model_config, module, weight_bytes, block_bytes, sharding, copies)


def with_dtypes(config: EngineConfig, platform: str) -> EngineConfig:
    """What "auto" means on devices of `platform`.

    KV is what decodes read most of.  In bfloat16 it takes half the time and the memory, and beside
    float32 weights it changes little (`tools/check_quality.py`); but who asks for a float32 model
    gets float32 throughout.
    """
    model, cache = config.model, config.cache
    if cache.dtype == "auto":
        kv_dtype = "bfloat16" if model.dtype == "auto" else model.dtype
        cache = dataclasses.replace(cache, dtype=kv_dtype)
    if model.dtype == "auto":
        model = dataclasses.replace(model, dtype=default_dtype(platform))
    return dataclasses.replace(config, model=model, cache=cache)


def block_bytes_of(model_config: Any, config: EngineConfig) -> int:
    """Bytes of a block on one device."""
    c = model_config
    shape = kv_shape(c.kv_layout.depth, 1, config.cache.block_size, c.K // config.mesh.tensor, c.H)
    return math.prod(shape) * jnp.dtype(config.cache.dtype).itemsize


def _pool_gib(config: EngineConfig, hf_config: dict[str, Any], sharding: Sharding) -> float:
    """GiB that this device has for the pool; 0 where that need not be measured or cannot be: on a
    device that reports its memory the largest programs are compiled to find out.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if config.cache.num_blocks or config.cache.memory_gib or not limit:
        return 0.0
    first = plan(config, hf_config, sharding=sharding)

    def measure_scratch() -> int:
        few = first.blocks_per_row * first.model_config.kv_layout.num_groups
        small = dataclasses.replace(config.cache, num_blocks=few)
        trial = dataclasses.replace(config, cache=small)
        step = plan(trial, hf_config, sharding=sharding).step()
        largest: dict[str, Any] = {}
        for spec in step.specs():
            if spec.bucket >= largest.setdefault(spec.kind, spec).bucket:
                largest[spec.kind] = spec
        programs = compile_programs(list(largest.values()), threads=_compile_threads())
        sizes = [p.memory for p in programs]
        return max(m.get("temp", 0) for m in sizes) + sum(
            m.get("outputs", 0) - m.get("aliased", 0) for m in sizes
        )

    return memory.pool_gib(limit, first.weight_bytes, measure_scratch)


def _load(checkpoint: Any, made: Plan, timer: "_Timer") -> Any:
    start = time.perf_counter()
    shardings = made.sharding.by_path(nnx.split(made.module)[1])
    dtype = made.config.model.dtype
    int8 = made.config.model.quantize == "int8"
    module = load_module(checkpoint, dtype, shardings, kv_copies=made.kv_copies, int8=int8)
    weights = nnx.split(module)[1]
    timer.parts["weights"] = time.perf_counter() - start
    return weights


def _compile_threads() -> int:
    return max(1, min(8, (os.cpu_count() or 1) - 1))


class _Timer:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self.parts[part] = now - self._last
        self._last = now
