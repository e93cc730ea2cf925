"""The GPU kernel in interpret mode: equal to the reference, and free of races."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import gpu
from pallas_kernels.ragged_paged_attention.cases import CASES, Case, make_inputs
from pallas_kernels.ragged_paged_attention.combine import combine
from pallas_kernels.ragged_paged_attention.tuning import GpuSizes
from tests.kernels import harness

# K of slots that nobody wrote is NaN: its scores are masked after the matmul.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
SIZES = GpuSizes(span=64, parts=3, part_turns=1)  # so that short contexts are split
TOLERANCE = 4e-2  # bfloat16


@functools.cache
def program(case: Case) -> Any:
    how = {"sizes": SIZES, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    return jax.jit(functools.partial(harness.attend, gpu, case, **how))


def run(case: Case, inputs: Any) -> np.ndarray:
    kind = Case("", (), 0, case.heads, soft_cap=case.soft_cap, scale=case.scale)
    arrays = harness.operands(inputs, "bfloat16", "bfloat16")
    return np.asarray(program(kind)(*arrays, harness.window_of(case)).astype(jnp.float32))


def check(case: Case, inputs: Any) -> None:
    expected = harness.want(case, inputs, "bfloat16", "bfloat16")
    np.testing.assert_allclose(run(case, inputs), expected, rtol=0, atol=TOLERANCE)


def for_hopper(case: Case) -> Case:
    """The case in the least head size and the nearest block size that the kernel has."""
    size = 16 if case.block_size < 16 else min(case.block_size, 128)
    width = 64 if case.heads[2] == 16 else -(-case.heads[2] // 64) * 64
    return dataclasses.replace(case, heads=(*case.heads[:2], width), block_size=size)


MIXED = Case(
    "mixed",
    ((1, 1), (1, 170), (1, 33), (5, 5), (0, 9), (40, 90), (2, 64)),
    3,
    heads=(4, 2, 64),
    window=50,
)
SHAPE = harness.padded(MIXED, tokens=60, rows=9)
VARIANTS = {
    "no window": dataclasses.replace(MIXED, window=None),
    "window": MIXED,
    "window of 1": dataclasses.replace(MIXED, window=1),
    "decodes": dataclasses.replace(
        MIXED, rows=((1, 64), (1, 65), (1, 200), (1, 129)), num_decodes=4
    ),
    "nothing": dataclasses.replace(MIXED, rows=(), num_decodes=0),
    "heads 9, 3 of 64, capped": dataclasses.replace(MIXED, heads=(9, 3, 64), soft_cap=2.0),
    "heads 8, 1 of 128": dataclasses.replace(MIXED, heads=(8, 1, 128), window=None),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_reference(name):
    case = VARIANTS[name]
    check(case, harness.poison(make_inputs(case, at_least=SHAPE)))


@settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=harness.batches(), seed=st.integers(0, 1000))
def test_equals_the_reference_on_any_batch(case, seed):
    case = dataclasses.replace(case, heads=MIXED.heads)
    shape = SHAPE._replace(tokens=90)
    check(case, harness.poison(make_inputs(case, seed=seed, at_least=shape)))


def test_combine_joins_parts_as_if_they_were_one():
    rng = np.random.default_rng(0)
    scores, v = rng.standard_normal((3, 4, 10)) * 30, rng.standard_normal((3, 4, 10, 8))
    used = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
    top = scores.max(-1)
    weights = np.exp(scores - top[..., None])
    sums = np.einsum("bps,bpsh->bph", weights, v)
    poison = np.where(used, 1.0, np.nan)
    got = combine(
        jnp.asarray(sums * poison[..., None]), top * poison, weights.sum(-1) * poison, used
    )
    whole = np.where(used[..., None], np.exp(scores - scores.max()), 0)
    total = whole.sum((1, 2))
    expected = np.einsum("bps,bpsh->bh", whole, v) / np.where(total == 0, 1, total)[:, None]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case):
    case = for_hopper(case)
    check(case, harness.poison(make_inputs(case)))
