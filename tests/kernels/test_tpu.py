"""The TPU kernels in interpret mode: equal to the reference, and free of races."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import stream, tpu
from pallas_kernels.ragged_paged_attention.cases import CASES, Case, make_inputs
from pallas_kernels.ragged_paged_attention.tuning import Sizes
from tests.kernels import harness

# Small pieces and short turns, so that small cases have many of both; two cores.
SIZES = Sizes(decode_rows=3, decode_span=48, tiles=(16, 4), tile_span=48, cores=2)
MODES = {
    "wait": pltpu.InterpretParams(),  # copies run when awaited, memory starts as NaN
    "races": pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
}
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}


@functools.cache
def program(case: Case, sizes: Sizes, mode: str) -> Any:
    how = {"sizes": sizes, "interpret": MODES[mode]}
    return jax.jit(functools.partial(harness.attend, tpu, case, **how))


def run(case: Case, inputs: Any, dtype="float32", kv_dtype="float32", mode="wait", sizes=SIZES):
    kind = Case("", (), 0, case.heads, soft_cap=case.soft_cap, scale=case.scale)
    arrays = harness.operands(inputs, dtype, kv_dtype)
    try:
        out = program(kind, sizes, mode)(*arrays, harness.window_of(case))
        return np.asarray(out.astype(jnp.float32))
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise


def check(case, inputs, dtype="float32", kv_dtype="float32", mode="wait", sizes=SIZES):
    got = run(case, inputs, dtype, kv_dtype, mode, sizes)
    expected = harness.want(case, inputs, dtype, kv_dtype)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[dtype])


def plain(case: Case) -> bool:
    """Cases that differ in their rows and window only: one program runs them all."""
    return dataclasses.replace(case, name="", rows=(), num_decodes=0, window=None) in (
        Case("", (), 0),
        Case("", (), 0, pad_tokens=0, pad_rows=0),
    )


QUICK = harness.padded(CASES[0], tokens=130, rows=13)
SHARED = [case for case in CASES if plain(case) and harness.fits(case, QUICK)]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_equals_the_reference(case):
    check(case, harness.poison(make_inputs(case, at_least=QUICK)))


MIXED = Case("small mixed", ((1, 1), (1, 70), (1, 33), (5, 5), (0, 9), (19, 40), (2, 64)), 3)
VARIANTS = {
    "heads 9, 3 of 64": dataclasses.replace(MIXED, heads=(9, 3, 64)),
    "heads 8, 1 of 128, capped": dataclasses.replace(MIXED, heads=(8, 1, 128), soft_cap=2.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_reference_in_other_heads(name):
    check(VARIANTS[name], harness.poison(make_inputs(VARIANTS[name])))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_equals_the_reference_over_one_byte_kv(kv_dtype):
    case = dataclasses.replace(MIXED, window=24)
    check(case, harness.poison(make_inputs(case)), "bfloat16", kv_dtype)


def test_no_copy_races_with_the_matmuls(capfd):
    check(MIXED, harness.poison(make_inputs(MIXED)), mode="races")
    assert "RACE" not in "".join(capfd.readouterr())  # jax < 0.12 prints, newer ones raise


@settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=harness.batches(), seed=st.integers(0, 1000))
def test_equals_the_reference_on_any_batch(case, seed):
    check(case, harness.poison(make_inputs(case, seed=seed, at_least=QUICK)))


def test_b16_a_row_has_the_same_bits_whatever_its_neighbours_hold():
    inputs = make_inputs(MIXED, at_least=QUICK)
    alone = run(MIXED, inputs)
    for victim in (1, 5):
        k, v = inputs.k.copy(), inputs.v.copy()
        mine = inputs.block_tables[victim, : -(-MIXED.rows[victim][1] // MIXED.block_size)]
        k[mine], v[mine] = np.nan, np.inf
        busy = run(MIXED, inputs._replace(k=k, v=v))
        place = slice(*inputs.query_starts[victim : victim + 2])
        np.testing.assert_array_equal(np.delete(busy, place, 0), np.delete(alone, place, 0))
        assert not np.isfinite(busy[place]).any()


def test_a_missing_wait_shows(monkeypatch):
    """Negative control: without waits the matmuls read memory that no copy has filled."""
    walk = stream.walk

    def hasty(count, turns, parity, copy, compute):
        def only_start(action, *place):
            if action is stream.start:
                copy(action, *place)

        def late(turn, slot):
            compute(turn, slot)
            piece = tpu.pl.program_id(0) * tpu.pl.num_programs(1) + tpu.pl.program_id(1)
            copy(stream.wait, piece, turn, slot)

        walk(count, turns, parity, only_start, late)

    monkeypatch.setattr(stream, "walk", hasty)
    case = Case("few", ((1, 40), (4, 20)), 1)
    inputs = make_inputs(case)
    window = harness.window_of(case)
    late = functools.partial(
        harness.attend, tpu, case, sizes=SIZES, interpret=pltpu.InterpretParams()
    )
    got = np.asarray(jax.jit(late)(*harness.operands(inputs, "float32", "float32"), window))
    assert np.isnan(got[:5]).any()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case, dtype, mode):
    sizes = dataclasses.replace(SIZES, decode_span=128, tile_span=128, tiles=(64, 8))
    check(case, harness.poison(make_inputs(case)), dtype, dtype, mode, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2", "float32"])
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_every_third_case_over_other_kv(case, kv_dtype):
    check(case, harness.poison(make_inputs(case)), "bfloat16", kv_dtype)
