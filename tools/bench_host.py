"""Host time of one engine step: python -m tools.bench_host [--rows 256] [--waiting 100000].

A runner that does nothing stands in for the device, so that only schedule, build and update are
measured.  Prints medians and P99 in microseconds, without and with a long queue, and as one JSON
object with --json.  Run it on an idle machine.
"""

import argparse
import gc
import json

import numpy as np

from jaxserve.batch.buckets import resolve
from jaxserve.batch.step import Batch, StepResult
from jaxserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.engine import Engine, ModelLimits
from jaxserve.metrics import StepRecord
from jaxserve.request import SamplingParams

VOCAB = 50_000
PARTS = ("schedule", "build", "update")


class IdleRunner:
    """Answers every row with the same token."""

    def dispatch(self, batch: Batch) -> StepResult:
        rows = batch.row_bucket
        return StepResult(np.ones(rows, np.int32), np.zeros(rows, np.bool_), None, (), 0.0)

    def result(self, handle: StepResult) -> StepResult:
        return handle


def measure(
    rows: int, context: int, waiting: int, steps: int, sampling: SamplingParams
) -> dict[str, dict[str, float]]:
    """Microseconds a step of `rows` decodes with about `context` tokens each, by part."""
    config = EngineConfig(
        model=ModelConfig(max_len=8192),
        cache=CacheConfig(
            block_size=32, num_blocks=rows * (context // 32 + 40), prefix_caching=True
        ),
        scheduler=SchedulerConfig(token_budget=8192, max_seqs=rows),
    )
    records: list[StepRecord] = []
    engine = Engine(
        resolve(config, 8192, 1),
        IdleRunner(),
        ModelLimits(VOCAB, frozenset({0})),
        on_step=records.append,
    )
    rng = np.random.default_rng(0)
    for _ in range(rows):
        engine.add(rng.integers(1, VOCAB, context).tolist(), sampling)
    while engine.num_waiting or any(r.num_pending > 1 for r in engine.scheduler.running):
        engine.step()
    prompt = rng.integers(1, VOCAB, 64).tolist()
    for _ in range(waiting):
        engine.add(prompt, sampling)
    gc.collect()
    for _ in range(20):
        engine.step()
    records.clear()
    for _ in range(steps):
        engine.step()
    assert all(record.decode_tokens == rows for record in records)
    times = {part: np.array([getattr(r, f"{part}_s") for r in records]) for part in PARTS}
    times["total"] = np.sum(list(times.values()), axis=0)
    return {
        part: {
            "median": round(float(np.median(values)) * 1e6, 1),
            "p99": round(float(np.quantile(values, 0.99)) * 1e6, 1),
        }
        for part, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    endless = {"max_tokens": 5000, "ignore_eos": True}
    cases = {
        "greedy": (0, SamplingParams(temperature=0.0, **endless)),
        "greedy, long queue": (options.waiting, SamplingParams(temperature=0.0, **endless)),
        "random": (0, SamplingParams(temperature=0.8, top_p=0.9, **endless)),
        "full": (0, SamplingParams(presence_penalty=0.5, **endless)),
    }
    report = {
        name: measure(options.rows, options.context, waiting, options.steps, sampling)
        for name, (waiting, sampling) in cases.items()
    }
    if options.json:
        print(json.dumps(report))
        return
    print(f"microseconds a step, {options.rows} rows of {options.context} tokens: median (P99)")
    for name, parts in report.items():
        cells = "  ".join(f"{k} {v['median']:.0f} ({v['p99']:.0f})" for k, v in parts.items())
        print(f"{name:20} {cells}")


if __name__ == "__main__":
    main()
