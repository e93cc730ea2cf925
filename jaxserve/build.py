"""The only place that assembles: a config becomes weights, runner and engine."""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve import sources
from jaxserve.batch.buckets import resolve
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine, ModelLimits
from jaxserve.metrics import StepRecord
from jaxserve.runner import allocator, compile_cache, memory, warmup
from jaxserve.runner.device_step import DeviceStep
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.programs import compile_programs
from jaxserve.runner.sharding import Sharding, device_bytes
from jaxserve.runner.sharding import make as make_sharding
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from model_zoo import registry
from model_zoo.partition import kv_copies
from model_zoo.weights import load_module, open_checkpoint
from model_zoo.weights.fill import with_kv_copies
from pallas_kernels.ragged_paged_attention.api import kv_shape

DEFAULT_DTYPE = "bfloat16"  # of model.dtype "auto"
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A ready engine and what it was made of."""

    engine: Engine
    runner: ModelRunner
    tokenizer: Tokenizer
    config: EngineConfig  # resolved: nothing is left to derive
    startup: dict[str, float]  # seconds of each part of the start; parts may overlap

    def close(self) -> None:
        self.runner.close()


def assemble(
    config: EngineConfig,
    *,
    on_step: Callable[[StepRecord], None] | None = None,
    log: Log = lambda line: None,
) -> Assembly:
    """Loads the model that `config` names and makes every program ready to serve.

    Raises ValueError or OSError with one clear line when model and config do not go together,
    before anything is compiled; `warmup.ProofError` when a program does not give the right answers.
    """
    timer = _Timer()
    compile_cache.enable(config.runner.compile_cache, lambda line: log(f"warning: {line}"))
    if jax.default_backend() == "cpu":
        allocator.keep_scratch()
    path = sources.resolve(config.model.name)
    timer.mark("find")
    checkpoint = open_checkpoint(path)
    with ThreadPoolExecutor(2) as pool:
        loading_tokenizer = pool.submit(load_tokenizer, Path(path))
        config, abstract = _resolve(config, checkpoint)
        tokenizer = loading_tokenizer.result()
        vocab_size = min(tokenizer.vocab_size, abstract.model_config.V)
        timer.mark("read")
        graphdef, weights = nnx.split(abstract.module)
        loading = pool.submit(_load, checkpoint, config, abstract, timer)
        step = DeviceStep(
            graphdef, weights, abstract.model_config, config, vocab_size, abstract.sharding
        )
        runner = ModelRunner(step, config, threads=_compile_threads())
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
    warmup.warm_up(runner)
    timer.mark("warm_up")
    limits = ModelLimits(vocab_size, tokenizer.eos_ids)
    engine = Engine(config, runner, limits, on_step=on_step)
    engine.set_costs(runner.costs())
    return Assembly(engine, runner, tokenizer, config, timer.parts)


class _Abstract(NamedTuple):
    """A model without weights."""

    model_config: Any
    module: Any
    sharding: Sharding
    kv_copies: int


def _resolve(config: EngineConfig, checkpoint: Any) -> tuple[EngineConfig, _Abstract]:
    dtype = DEFAULT_DTYPE if config.model.dtype == "auto" else config.model.dtype
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    sharding = make_sharding(config.mesh.data, config.mesh.tensor)

    def make(max_len: int) -> _Abstract:
        family, model_config = registry.configure(checkpoint, dtype, max_len=max_len)
        copies = kv_copies(model_config.N, model_config.K, config.mesh.tensor)
        model_config = with_kv_copies(model_config, copies)
        module = nnx.eval_shape(lambda: family.module(model_config, nnx.Rngs(0)))
        return _Abstract(model_config, module, sharding, copies)

    abstract = make(config.model.max_len)
    asked = config.model.max_len  # what was not asked for is not stretched
    max_len = abstract.model_config.longest if asked else abstract.model_config.max_position
    block_bytes = block_bytes_of(abstract.model_config, config, dtype)
    if not config.cache.num_blocks:
        gib = _pool_gib(config, abstract, max_len, block_bytes)
        cache = dataclasses.replace(config.cache, memory_gib=gib)
        config = dataclasses.replace(config, cache=cache)
    config = resolve(config, max_len, block_bytes)
    return config, make(config.model.max_len)


def block_bytes_of(model_config: Any, config: EngineConfig, dtype: str) -> int:
    """Bytes of a block on one device."""
    c = model_config
    shape = kv_shape(c.L, 1, config.cache.block_size, c.K // config.mesh.tensor, c.H)
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _pool_gib(config: EngineConfig, abstract: _Abstract, max_len: int, block_bytes: int) -> float:
    """Size of the pool; on a device that reports its memory the largest programs are compiled to
    find out.
    """
    graphdef, weights = nnx.split(abstract.module)
    weight_bytes = device_bytes(abstract.sharding.weights(weights))

    def measure_scratch() -> int:
        small = dataclasses.replace(config.cache, num_blocks=-(-max_len // config.cache.block_size))
        trial = resolve(dataclasses.replace(config, cache=small), max_len, block_bytes)
        c = abstract.model_config
        step = DeviceStep(graphdef, weights, c, trial, c.V, abstract.sharding)
        largest: dict[str, Any] = {}
        for spec in step.specs():
            if spec.bucket >= largest.setdefault(spec.kind, spec).bucket:
                largest[spec.kind] = spec
        programs = compile_programs(list(largest.values()), threads=_compile_threads())
        sizes = [p.memory for p in programs]
        return max(m.get("temp", 0) for m in sizes) + sum(
            m.get("outputs", 0) - m.get("aliased", 0) for m in sizes
        )

    stats = jax.local_devices()[0].memory_stats()
    return memory.pool_gib(config.cache.memory_gib, stats, weight_bytes, measure_scratch)


def _load(checkpoint: Any, config: EngineConfig, abstract: "_Abstract", timer: "_Timer") -> Any:
    start = time.perf_counter()
    shardings = abstract.sharding.by_path(nnx.split(abstract.module)[1])
    module = load_module(checkpoint, config.model.dtype, shardings, kv_copies=abstract.kv_copies)
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
