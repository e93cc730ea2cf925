"""Kernels and whole steps on the device at hand: right, and how fast.

tools/check_device.sh [--output device.json] [--seconds 480] [--small]

1. ceilings: copy bandwidth and bfloat16 matmul rate, measured
2. attention and KV write against the float64 reference, on every case of the kernels' own tests
3. decode and prefill attention of an 8B-shaped model, beside plain XLA and JAX's stock kernels
4. whole steps (layers, head, sampling) over buckets of a small and an 8B-shaped random model

Every figure is a median of timed calls after a first one; achieved rates are held against 1.
What does not fit into the time, or fails, is named in the output: nothing is left out silently.
`--small` shrinks every shape, so that a CPU can run the script itself.
"""

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AIMS = {"decode_attention": 0.8, "prefill_attention": 0.6, "step": 0.7}  # shares of the ceilings


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is timed."""

    copy_bytes: int
    matmul: int
    heads: tuple[int, int, int]  # N, K, H
    decodes: tuple[tuple[int, int], ...]  # rows, context
    prefills: tuple[tuple[int, int], ...]  # queries of one row, context before them
    models: tuple[str, ...]
    block_size: int = 64


FULL = Sizes(
    copy_bytes=1 << 31,
    matmul=8192,
    heads=(32, 8, 128),
    decodes=((8, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 4096)),
    prefills=((512, 0), (2048, 0), (2048, 6144)),
    models=("small", "8b"),
)
SMALL = Sizes(1 << 22, 256, (4, 2, 64), ((4, 128),), ((64, 0),), ("small",))

MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
}


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float):
        self._end = time.perf_counter() + seconds

    def left(self) -> float:
        return self._end - time.perf_counter()


def timed(call: Callable[[], Any], *, repeats: int = 10) -> float:
    """Median seconds of a call; the first, which compiles, is not counted."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def ceilings(sizes: Sizes) -> dict[str, float]:
    """Measured: bytes a second of a copy (read and write), FLOPs a second of a bfloat16 matmul.

    Each is repeated inside one program, so that the cost of a call does not count.
    """
    turns = 8
    x = jnp.ones(sizes.copy_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda i, x: x + 1.0, x))
    copied = timed(functools.partial(copy, x)) / turns
    x.delete()
    a = jnp.full((sizes.matmul, sizes.matmul), 0.01, jnp.bfloat16)
    matmul = jax.jit(lambda a: jax.lax.fori_loop(0, turns, lambda i, b: a @ b, a))
    multiplied = timed(functools.partial(matmul, a)) / turns
    return {
        "copy_bytes_per_s": 2 * sizes.copy_bytes / copied,
        "matmul_flops_per_s": 2 * sizes.matmul**3 / multiplied,
    }


def ragged(
    sizes: Sizes, rows: list[tuple[int, int]], num_decodes: int, dtype: Any = jnp.bfloat16
) -> tuple[Any, ...]:
    """Arguments of attention for rows of (queries, context with them), in shuffled blocks."""
    from pallas_kernels.ragged_paged_attention import api

    heads, kv_heads, width = sizes.heads
    blocks = [-(-length // sizes.block_size) for _, length in rows]
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    tables = np.zeros((len(rows), max(blocks)), np.int32)
    for row, end in enumerate(np.cumsum(blocks)):
        tables[row, : blocks[row]] = order[end - blocks[row] : end]
    counts = [count for count, _ in rows]
    shape = api.kv_shape(1, sum(blocks), sizes.block_size, kv_heads, width)
    key = jax.random.key(0)
    kv = jax.tree.map(
        lambda a: (jax.random.normal(key, a.shape, jnp.float32) * 0.5).astype(a.dtype),
        api.init_kv(shape, jnp.dtype(dtype).name),
    )
    q = jax.random.normal(key, (sum(counts), heads, width), jnp.float32).astype(dtype)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lens = np.array([length for _, length in rows], np.int32)
    layer = jnp.zeros((), jnp.int32)
    rest = (tables, starts, lens, np.array([num_decodes], np.int32))
    return (q, kv, layer, *map(jnp.asarray, rest))


def attention_calls(sizes: Sizes) -> dict[str, Callable[..., Any]]:
    """The engine's kernel for this device, and plain XLA."""
    from pallas_kernels.ragged_paged_attention import api

    call = functools.partial(api.ragged_paged_attention, block_size=sizes.block_size)
    own = "xla" if api.unsupported_device(jax.devices()[0]) else "auto"
    return {
        "engine": jax.jit(functools.partial(call, implementation=own)),
        "xla": jax.jit(functools.partial(call, implementation="xla")),
    }


def stock(sizes: Sizes, rows: list[tuple[int, int]]) -> Callable[[], Any]:
    """JAX's own ragged paged attention of TPUs over the same work; raises where there is none."""
    if jax.default_backend() != "tpu":
        raise NotImplementedError("JAX has no maintained paged attention for this device")
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    heads, kv_heads, width = sizes.heads
    blocks = [-(-length // sizes.block_size) for _, length in rows]
    tables = np.zeros((len(rows), max(blocks)), np.int32)
    for row, end in enumerate(np.cumsum(blocks)):
        tables[row, : blocks[row]] = np.arange(end - blocks[row], end)
    counts = [count for count, _ in rows]
    key = jax.random.key(0)
    q = jax.random.normal(key, (sum(counts), heads, width), jnp.bfloat16)
    pages = jax.random.normal(
        key, (sum(blocks), sizes.block_size, 2 * kv_heads, width), jnp.bfloat16
    )
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    call = functools.partial(
        ragged_paged_attention,
        sm_scale=width**-0.5,
        num_kv_pages_per_block=max(1, 512 // sizes.block_size),
        num_queries_per_block=32,
    )
    lens = jnp.asarray([length for _, length in rows], jnp.int32)
    arguments = (q, pages, lens, jnp.asarray(tables), starts, jnp.asarray([len(rows)], jnp.int32))
    run = jax.jit(lambda *arguments: call(*arguments))
    return lambda: run(*arguments)


def attention(sizes: Sizes, tops: dict[str, float], clock: Clock) -> Iterator[dict[str, Any]]:
    """Decode against copy bandwidth, prefill against the matmul rate."""
    heads, kv_heads, width = sizes.heads
    work = [("decode", [(1, context)] * rows, rows) for rows, context in sizes.decodes]
    work += [("prefill", [(count, before + count)], 0) for count, before in sizes.prefills]
    for kind, rows, decodes in work:
        entry: dict[str, Any] = {"kind": kind, "rows": len(rows), "row": rows[0]}
        if clock.left() < 60:
            yield entry | {"skipped": "no time left"}
            continue
        arguments = ragged(sizes, rows, decodes)
        read = sum(length for _, length in rows) * kv_heads * 2 * width * 2
        seen = sum(count * (length - (count - 1) / 2) for count, length in rows)
        flops = 4.0 * heads * width * seen
        calls: dict[str, Callable[[], Any]] = {
            name: functools.partial(call, *arguments)
            for name, call in attention_calls(sizes).items()
        }
        try:
            calls["stock"] = stock(sizes, rows)
        except Exception as error:  # another version's kernel is no reason to stop
            entry["stock_error"] = _line(error)
        for name, call in calls.items():
            try:
                seconds = timed(call)
            except Exception as error:
                entry[f"{name}_error"] = _line(error)
                continue
            entry[f"{name}_us"] = 1e6 * seconds
            if kind == "decode":
                entry[f"{name}_of_copy"] = read / seconds / tops["copy_bytes_per_s"]
            else:
                entry[f"{name}_of_matmul"] = flops / seconds / tops["matmul_flops_per_s"]
        yield entry


def correctness(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The engine's attention against a dense float64 computation on the host."""
    rows = {
        "decodes": ([(1, 1), (1, 63), (1, 64), (1, 65), (1, 300)], 5),
        "chunk": ([(100, 100)], 0),
        "chunk over a prefix": ([(37, 250)], 0),
        "mixed": ([(1, 200), (1, 17), (90, 90), (16, 80)], 2),
    }
    for dtype in (jnp.float32, jnp.bfloat16):
        for name, (work, decodes) in rows.items():
            arguments = ragged(sizes, work, decodes, dtype)
            found = attention_calls(sizes)["engine"](*arguments)
            expected = _dense(sizes, *map(_host, arguments))
            error = float(np.max(np.abs(_host(found) - expected)))
            limit = 2e-5 if dtype == jnp.float32 else 2e-2
            entry = {"case": name, "dtype": jnp.dtype(dtype).name, "error": error, "limit": limit}
            yield entry | {"ok": bool(error <= limit)}


def _dense(sizes: Sizes, q: Any, kv: Any, layer: Any, *rows: Any) -> np.ndarray:
    tables, starts, lens, _ = rows
    heads, kv_heads, width = sizes.heads
    out = np.zeros(q.shape)
    for row, length in enumerate(lens):
        begin, end = starts[row], starts[row + 1]
        used = tables[row, : -(-length // sizes.block_size)]
        pages = kv[0][used].transpose(1, 0, 2, 3).reshape(kv_heads, -1, 2 * width)[:, :length]
        for head in range(heads):
            k, v = np.split(pages[head // (heads // kv_heads)], 2, axis=-1)
            scores = q[begin:end, head] @ k.T * width**-0.5
            at = length - (end - begin) + np.arange(end - begin)
            scores[np.arange(length)[None] > at[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[begin:end, head] = weights / weights.sum(axis=1, keepdims=True) @ v
    return out


def _host(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array if array.dtype.kind == "i" else array.astype(np.float64)


def steps(sizes: Sizes, tops: dict[str, float], clock: Clock) -> Iterator[dict[str, Any]]:
    """Whole steps of random models: every token bucket, with its head and greedy sampling."""
    for name in sizes.models:
        if clock.left() < (240 if name == "8b" else 30):
            yield {"model": name, "skipped": "no time left"}
            continue
        try:
            yield from _model_steps(name, sizes, tops, clock)
        except Exception as error:  # an out-of-memory model leaves the rest of the report
            yield {"model": name, "error": _line(error)}


def _model_steps(
    name: str, sizes: Sizes, tops: dict[str, float], clock: Clock
) -> Iterator[dict[str, Any]]:
    from jaxserve.runner.model_runner import ModelRunner

    small = sizes is SMALL
    step, config = random_step(name, small)
    runner = ModelRunner(step, config, threads=4)
    try:
        runner.load(random_weights(step))
        for bucket in config.buckets.tokens:
            if clock.left() < 30:
                yield {"model": name, "tokens": bucket, "skipped": "no time left"}
                continue
            for context in (128,) if small else (128, 2048):
                yield _one_step(name, runner, bucket, context, tops)
    finally:
        runner.close()


def random_step(name: str, small: bool) -> tuple[Any, Any]:
    """An 8B-shaped (or small) Llama under a config for one device, abstract."""
    from flax import nnx

    from jaxserve.batch.buckets import resolve
    from jaxserve.config import (
        BucketConfig,
        CacheConfig,
        EngineConfig,
        ModelConfig,
        SamplingConfig,
        SchedulerConfig,
    )
    from jaxserve.runner.device_step import DeviceStep
    from model_zoo import registry

    tokens = (16, 64) if small else (16, 64, 256, 1024)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    hf = MODELS[name] | {"model_type": "llama", "max_position_embeddings": 8192}
    hf |= {"tie_word_embeddings": name == "small", "rope_theta": 500000.0}
    if small:
        hf |= {"num_hidden_layers": 1, "vocab_size": 1024}
    config = EngineConfig(
        model=ModelConfig(name=name, dtype=dtype, max_len=4096),
        cache=CacheConfig(block_size=64, num_blocks=256 if small else 4096),
        scheduler=SchedulerConfig(token_budget=tokens[-1], max_seqs=64),
        buckets=BucketConfig(tokens=tokens, rows=(64,)),
        sampling=SamplingConfig(random=False, penalties=False, logprobs=False),
    )
    family = registry.family("llama")
    model_config = family.config_from_hf(hf, dtype=dtype, max_len=4096)
    config = resolve(config, model_config.max_position, 1)
    module = nnx.eval_shape(lambda: family.module(model_config, nnx.Rngs(0)))
    graphdef, weights = nnx.split(module)
    return DeviceStep(graphdef, weights, model_config, config, model_config.V), config


def random_weights(step: Any) -> Any:
    """Made on the device, a parameter at a time, scaled as a model's."""

    def one(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        scale = leaf.shape[-1] ** -0.5
        make = jax.jit(
            lambda key: (jax.random.normal(key, leaf.shape, leaf.dtype) * scale).astype(leaf.dtype)
        )
        return make(jax.random.key(len(leaf.shape)))

    return jax.tree.map(one, step.abstract_weights)


def _one_step(
    name: str, runner: Any, bucket: int, context: int, tops: dict[str, float]
) -> dict[str, Any]:
    """A step full of decodes, and of one chunk when there are more tokens than rows."""
    from jaxserve.preflight import roofline
    from jaxserve.runner.sharding import device_bytes

    step, state = runner.step, runner.state
    packed, rows = fill_step(step, bucket, context)
    heads = runner.manifest.buckets("head")[0]
    index, seats = np.zeros(heads, np.int32), np.full(heads, step.num_seats, np.int32)

    def call() -> Any:
        backbone = runner.manifest.get("backbone", bucket)
        state.kv, state.hidden, _ = backbone(
            runner.weights, state.kv, state.hidden, state.last_tokens, packed
        )
        logits = runner.manifest.get("head", heads)(runner.weights, state.hidden, index)
        return runner.manifest.get("greedy", heads)(logits, seats, state.last_tokens)

    seconds = timed(call)
    c, weights = step.model_config, device_bytes(step.abstract_weights)
    shape = {"tokens": bucket, "rows": rows, "context": context, "data": 1, "tensor": 1}
    load = roofline.step_load(c, weights, shape | {"itemsize": step.dtype.itemsize})
    bound = max(
        (load.weight_bytes + load.kv_bytes) / tops["copy_bytes_per_s"],
        load.flops / tops["matmul_flops_per_s"],
    )
    return {
        "model": name,
        "tokens": bucket,
        "rows": rows,
        "context": context,
        "ms": 1e3 * seconds,
        "of_roofline": bound / seconds,
        "tokens_per_s": bucket / seconds,
    }


def fill_step(step: Any, bucket: int, context: int) -> tuple[np.ndarray, int]:
    """A packed step of as many decodes as there are rows, and one chunk for the rest."""
    from model_zoo.step_inputs import unpack

    packed = step.padding_step(bucket)
    x = unpack(packed, step.shapes(bucket))
    size = step.config.cache.block_size
    chunk = max(0, bucket - step.num_seats)
    decodes = min(bucket, step.num_seats) - (1 if chunk else 0)
    counts = [1] * decodes + ([bucket - decodes] if chunk else [])
    at = 0
    for row, count in enumerate(counts):
        length = max(context, count)
        positions = np.arange(length - count, length)
        blocks = (np.arange(step.blocks_per_row) + row * 37) % step.num_blocks
        x.block_tables[row] = blocks
        x.tokens[at : at + count] = np.arange(count) % 1000
        x.positions[at : at + count] = positions
        slots = blocks[positions // size] * size + positions % size
        # Rows may share blocks here, and no two tokens of a step may write to one slot.
        x.slots[at : at + count] = np.where(row == len(counts) - 1, slots, step.num_slots)
        at += count
        x.kv_lens[row] = length
        x.query_starts[row + 1 :] = at
    x.num_decodes[0] = decodes
    return packed, len(counts)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """The best share reached of each aim, and whether that is enough."""
    decode = [e["engine_of_copy"] for e in found["attention"] if "engine_of_copy" in e]
    prefill = [e["engine_of_matmul"] for e in found["attention"] if "engine_of_matmul" in e]
    whole = [e["of_roofline"] for e in found["steps"] if "of_roofline" in e]
    reached = {
        "decode_attention": max(decode, default=None),
        "prefill_attention": max(prefill, default=None),
        "step": max(whole, default=None),
    }
    return {
        name: {"aim": aim, "best": best, "reached": best is not None and best >= aim}
        for name, aim in AIMS.items()
        for best in [reached[name]]
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("device.json"))
    parser.add_argument("--seconds", type=float, default=450.0, help="time that may be taken")
    parser.add_argument("--small", action="store_true", help="tiny shapes: tests the script itself")
    args = parser.parse_args(arguments)
    if jax.default_backend() == "cpu" and not args.small:
        print("check_device: there is no accelerator here; --small runs on a CPU", file=sys.stderr)
        return 2
    clock, sizes = Clock(args.seconds), SMALL if args.small else FULL
    device = jax.devices()[0]
    found: dict[str, Any] = {
        "device": {"platform": device.platform, "kind": device.device_kind},
        "devices": len(jax.devices()),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "small": args.small,
    }
    found["ceilings"] = ceilings(sizes)
    found["correctness"] = _collect("correctness", correctness(sizes))
    found["attention"] = _collect("attention", attention(sizes, found["ceilings"], clock))
    found["steps"] = _collect("step", steps(sizes, found["ceilings"], clock))
    found["aims"] = verdict(found)
    found["seconds"] = args.seconds - clock.left()
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"aims": found["aims"], "written": str(args.output)}))
    return 0 if all(entry.get("ok") for entry in found["correctness"]) else 1


def _collect(title: str, entries: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """All entries; one that raises ends its part with its error, not the run."""
    gathered: list[dict[str, Any]] = []
    try:
        for entry in entries:
            print(f"{title}: {json.dumps(entry)}", file=sys.stderr)
            gathered.append(entry)
    except Exception as error:
        print(f"{title}: {_line(error)}", file=sys.stderr)
        gathered.append({"error": _line(error), "ok": False})
    return gathered


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
