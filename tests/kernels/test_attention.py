"""Laws of the attention of every back end: it equals the dense reference on any ragged batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import api
from pallas_kernels.ragged_paged_attention.cases import CASES, Case, Inputs, Shape, make_inputs
from tests.kernels import harness

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}
SHAPE = Shape(tokens=520, rows=48)  # one program for all cases that differ in their rows only


def shape_for(case: Case) -> Shape:
    table = -(-harness.KV_LENGTH // case.block_size)
    return SHAPE._replace(table=table, blocks=3 * table + 40)


@functools.partial(jax.jit, static_argnames=("block_size", "window", "soft_cap", "scale"))
def attention(q, kv, tables, starts, lens, num_decodes, **options):
    layer = jnp.int32(harness.LAYER)
    return api.ragged_paged_attention(q, kv, layer, tables, starts, lens, num_decodes, **options)


def run(case: Case, inputs: Inputs, dtype: str = "float32", kv_dtype: str = "") -> np.ndarray:
    """Output of the program in float32."""
    blocks, block_size, kv_heads, width = inputs.k.shape
    kv = api.init_kv(api.kv_shape(3, blocks, block_size, kv_heads, width), kv_dtype or dtype)
    both = api.side_by_side(jnp.asarray(inputs.k), jnp.asarray(inputs.v)).transpose(0, 2, 1, 3)
    kv = jnp.full_like(kv, jnp.nan).at[harness.LAYER].set(both.astype(kv.dtype))
    out = attention(
        jnp.asarray(inputs.q, dtype), kv, *inputs[3:], block_size=block_size, **options(case)
    )
    return np.asarray(out.astype(jnp.float32))


def want(case: Case, inputs: Inputs, dtype: str = "float32") -> np.ndarray:
    return harness.want(case, inputs, dtype, dtype)


def options(case: Case) -> dict:
    return {"window": case.window, "soft_cap": case.soft_cap, "scale": case.scale}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_b07_equals_the_reference(case, dtype):
    inputs = make_inputs(case, at_least=shape_for(case))
    np.testing.assert_allclose(
        run(case, inputs, dtype), want(case, inputs, dtype), rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_over_bfloat16_kv_rounds_nothing_but_the_kv(case):
    inputs = make_inputs(case, at_least=shape_for(case))
    got = run(case, inputs, kv_dtype="bfloat16")
    expected = harness.want(case, inputs, "float32", "bfloat16")
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE["float32"])


SMALL = [case for case in CASES if sum(count for count, _ in case.rows) < 60 and not case.window]


@pytest.mark.parametrize("case", SMALL[:6], ids=lambda case: case.name)
def test_equals_the_reference_in_a_program_of_its_own_size(case):
    inputs = make_inputs(case)
    np.testing.assert_allclose(run(case, inputs), want(case, inputs), rtol=0, atol=2e-5)


@st.composite
def batches(draw) -> Case:
    """Any ragged batch of up to 12 rows, with empty rows between the chunks."""
    decodes = draw(st.lists(st.integers(1, 150), max_size=6))
    chunks = draw(st.lists(st.tuples(st.integers(0, 75), st.integers(0, 75)), max_size=6))
    rows = (*((1, length) for length in decodes), *((n, n + before) for n, before in chunks))
    return Case("drawn", rows, len(decodes), window=draw(st.sampled_from([None, 24])))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(case=batches(), seed=st.integers(0, 1000))
def test_equals_the_reference_on_any_batch(case, seed):
    inputs = make_inputs(case, seed=seed, at_least=shape_for(case))
    np.testing.assert_allclose(run(case, inputs), want(case, inputs), rtol=0, atol=2e-5)


MIXED = next(case for case in CASES if case.name == "mixed")


def test_b16_a_row_has_the_same_bits_whatever_its_neighbours_hold():
    """Even when a neighbour's keys and values are not finite."""
    inputs = make_inputs(MIXED, at_least=shape_for(MIXED))
    alone = run(MIXED, inputs)
    for victim, (_, length) in enumerate(MIXED.rows):
        k, v = inputs.k.copy(), inputs.v.copy()
        mine = inputs.block_tables[victim, : -(-length // MIXED.block_size)]
        k[mine], v[mine] = np.nan, np.inf
        busy = run(MIXED, inputs._replace(k=k, v=v))
        first, end = inputs.query_starts[victim : victim + 2]
        np.testing.assert_array_equal(
            np.delete(busy, slice(first, end), 0), np.delete(alone, slice(first, end), 0)
        )
        assert not np.isfinite(busy[first:end]).any()


def test_a_row_has_the_same_bits_at_any_place_in_the_batch():
    rows = ((1, 300), (1, 40), (1, 7), (1, 1))
    case = Case("decodes", rows, len(rows))
    inputs = make_inputs(case, at_least=shape_for(case))
    turned = inputs._replace(
        q=np.concatenate([inputs.q[3::-1], inputs.q[4:]]),
        block_tables=np.concatenate([inputs.block_tables[3::-1], inputs.block_tables[4:]]),
        kv_lens=np.concatenate([inputs.kv_lens[3::-1], inputs.kv_lens[4:]]),
    )
    np.testing.assert_array_equal(run(case, turned)[:4], run(case, inputs)[3::-1])


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 191, 192, 193, 299])
def test_b01_a_prompt_cut_in_two_gives_the_same_rows(cut):
    whole = Case("whole", ((300, 450),), 0)
    inputs = make_inputs(whole, at_least=shape_for(whole))
    together = run(whole, inputs)[:300]
    parts = []
    for first, end in ((0, cut), (cut, 300)):
        starts = np.minimum(inputs.query_starts, end - first)
        lens = np.where(inputs.kv_lens > 0, 150 + end, 0).astype(np.int32)
        q = np.roll(inputs.q, -first, axis=0)
        part = inputs._replace(q=q, query_starts=starts, kv_lens=lens)
        parts.append(run(dataclasses.replace(whole), part)[: end - first])
    np.testing.assert_allclose(np.concatenate(parts), together, rtol=0, atol=2e-6)


def test_scratch_does_not_grow_with_the_longest_context_possible():
    def scratch(table: int) -> int:
        inputs = make_inputs(MIXED, at_least=Shape(tokens=64, rows=64, table=table, blocks=500))
        kv = jax.ShapeDtypeStruct(api.kv_shape(3, 500, 16, 2, 16), jnp.float32)
        lowered = attention.lower(jnp.asarray(inputs.q), kv, *inputs[3:], block_size=16)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    tables_grow_by = 4 * 64 * (4096 - 64)
    assert scratch(4096) - scratch(64) < 5 * tables_grow_by


def test_a_block_size_other_than_the_cache_has_is_refused():
    inputs = make_inputs(MIXED)
    kv = jnp.zeros(api.kv_shape(3, 500, 16, 2, 16))
    with pytest.raises(ValueError, match="blocks of 16 tokens, the step has 32"):
        attention(jnp.asarray(inputs.q), kv, *inputs[3:], block_size=32)


@pytest.mark.parametrize("implementation", ["xla", "auto"])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_equals_the_reference_over_one_byte_kv(kv_dtype, implementation):
    case = dataclasses.replace(MIXED, heads=(4, 2, 64), window=24)
    inputs = make_inputs(case)
    q, kv, layer, *rest, scales = harness.operands(inputs, "bfloat16", kv_dtype)
    run = functools.partial(
        api.ragged_paged_attention,
        block_size=16,
        implementation=implementation,
    )
    window = jnp.int32(case.window)  # an array: models whose layers differ have it as one
    got = jax.jit(lambda *a: run(*a[:-2], kv_scales=a[-2], window=a[-1]))(
        q, kv, layer, *rest, scales, window
    )
    expected = harness.want(case, inputs, "bfloat16", kv_dtype)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0, atol=4e-2)


def test_one_byte_kv_without_scales_is_refused():
    inputs = make_inputs(MIXED)
    kv = jnp.zeros(api.kv_shape(3, 500, 16, 2, 16), "int8")
    with pytest.raises(ValueError, match="needs kv_scales"):
        attention(jnp.asarray(inputs.q), kv, *inputs[3:], block_size=16)


@pytest.mark.parametrize(
    ("name", "dtype", "block_size", "reason"),
    [
        ("gpu", "float32", 16, "no wgmma"),
        ("gpu", "bfloat16", 24, "block_size 24"),
        ("tpu", "bfloat16", 2**16, "VMEM"),
        ("tpu", "float32", 16, "float32 queries over bfloat16 KV"),
    ],
)
def test_a_named_kernel_says_why_it_cannot(name, dtype, block_size, reason):
    q = jax.ShapeDtypeStruct((8, 4, 64), dtype)
    dtype = "bfloat16" if "bfloat16 KV" in reason else dtype
    kv = jax.ShapeDtypeStruct(api.kv_shape(2, 4, block_size, 2, 64), dtype)
    i = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    call = functools.partial(api.ragged_paged_attention, block_size=block_size, implementation=name)
    with pytest.raises(ValueError, match=f"attention kernel '{name}'.*{reason}"):
        jax.eval_shape(call, q, kv, i(), i(4, 8), i(5), i(4), i(1))
