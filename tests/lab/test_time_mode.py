"""Mode time where a long prompt comes beside streams, in virtual time with the costs that
`lab profile` measured for the default model on two slow cores (float32, KV in bfloat16)."""

import dataclasses
import functools

import pytest

from jaxserve.batch.buckets import resolve
from jaxserve.config import BucketConfig, CacheConfig, EngineConfig, SchedulerConfig, SloConfig
from jaxserve.costs import CostModel
from jaxserve.lab import simulate
from jaxserve.lab.arrivals import Arrival

TOKENS, ROWS = (1, 8, 16, 24, 32, 64, 128, 256, 512), (1, 8, 16, 32)
CPU = CostModel(
    TOKENS,
    (0.030, 0.061, 0.076, 0.085, 0.097, 0.146, 0.221, 0.380, 0.718),
    rows=ROWS,
    sampling={"greedy": (0.002, 0.024, 0.025, 0.037)},
    single=6e-5,
    single_context=8e-7,
    chunk=0.003,
    turn_row=4e-4,
    tile_pair=7.6e-7,
    host=0.007,
    host_row=4e-5,
)
STREAMS = [Arrival(0.0, 32, 128)] * 16
LONG = Arrival(0.0, 1900, 16, is_late=True)  # when every stream has 32 tokens


@functools.cache
def gaps(mode: str, ttft_s: float, tpot_ms: float) -> tuple[float, float, float]:
    """P99 and most of the time between two tokens, ms, and the time to the first token of the long
    prompt, s; of `lab simulate`."""
    config = EngineConfig(
        cache=CacheConfig(num_blocks=2000),
        scheduler=SchedulerConfig(mode=mode, token_budget=512, max_seqs=32, stall_limit=0),
        buckets=BucketConfig(TOKENS, ROWS),
        slo=SloConfig(ttft_ms=1e3 * ttft_s, tpot_ms=tpot_ms),
    )
    played = simulate.play(resolve(config, 4096, 1 << 20), CPU, [*STREAMS, LONG])
    report = simulate.report(played, None, None)
    assert report["stall"]["largest_gap_ms"] == report["itl_ms"]["max"]
    return report["itl_ms"]["p99"], report["itl_ms"]["max"], report["stall"]["late_ttft_s"]


@pytest.mark.parametrize(("ttft_s", "tpot_ms"), [(20, 300), (12, 400), (60, 250)])
def test_a_long_prompt_breaks_the_pace_of_the_token_budget_only(ttft_s: float, tpot_ms: float):
    p99, most, _ = gaps("dynamic", ttft_s, tpot_ms)
    assert 2 * tpot_ms < p99 < most
    p99, most, first = gaps("time", ttft_s, tpot_ms)
    assert p99 <= most <= tpot_ms and first <= ttft_s


def test_contexts_beyond_a_window_do_not_slow_the_pace():
    """Contexts of 1,500 take 0.48 s where all of it is read and 0.04 s in a window of 128, so every
    step can keep TPOT."""
    tpot_ms = 600
    costs = dataclasses.replace(CPU, single_context=2e-5, turn_row=0.0)
    config = EngineConfig(
        cache=CacheConfig(num_blocks=2000),
        scheduler=SchedulerConfig(mode="time", token_budget=512, max_seqs=32, stall_limit=0),
        buckets=BucketConfig(TOKENS, ROWS),
        slo=SloConfig(ttft_ms=60_000, tpot_ms=tpot_ms),
    )
    streams = [Arrival(0.0, 1500, 400)] * 16
    made = resolve(config, 4096, 1 << 20, windows=(128,))
    played = simulate.play(made, costs, [*streams, LONG], windows=(128,))
    mixed = [step for step in played.steps if step.decode_tokens == 16 and step.prefill_tokens]
    assert len(mixed) > 3
    assert 0.6 * tpot_ms < 1e3 * max(step.device_s for step in mixed) <= tpot_ms


def test_a_prompt_in_a_hurry_takes_of_the_lead_what_it_needs():
    """Steps of 250 ms would bring its first token after 20 s."""
    _, whole, _ = gaps("dynamic", 8, 250)
    _, most, first = gaps("time", 8, 250)
    assert first <= 8 and 250 < most < 0.6 * whole
