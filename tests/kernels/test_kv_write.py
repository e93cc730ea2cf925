"""Laws of the KV write: each token in its slot, nothing else touched, nothing copied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write import tpu
from pallas_kernels.kv_write import xla as xla_write
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.ragged_paged_attention import api

LAYERS, BLOCKS, SIZE, HEADS, WIDTH = 3, 5, 4, 2, 8
SLOTS = BLOCKS * SIZE


def filled() -> jax.Array:
    shape = api.kv_shape(LAYERS, BLOCKS, SIZE, HEADS, WIDTH)
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)


def tokens(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((2, count, HEADS, WIDTH)).astype(np.float32))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_each_token_lies_in_its_slot_and_nothing_else_changes(layer):
    slots = np.array([7, 0, 19, SLOTS, 12, SLOTS + 5, 1], np.int32)
    k, v = tokens(len(slots))
    expected = np.array(filled())
    for slot, token_k, token_v in zip(slots, k, v, strict=True):
        if slot < SLOTS:
            block, offset = divmod(int(slot), SIZE)
            expected[layer, block, :, offset] = np.concatenate([token_k, token_v], -1)
    got = jax.jit(kv_write)(filled(), jnp.int32(layer), slots, k, v)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("slot", [SLOTS, SLOTS + 1, SLOTS + SIZE, 2**31 - 1])
def test_b15_padding_is_dropped(slot):
    k, v = tokens(3)
    got = jax.jit(kv_write)(filled(), jnp.int32(1), np.full(3, slot, np.int32), k, v)
    np.testing.assert_array_equal(got, filled())


def test_values_are_rounded_to_the_dtype_of_the_cache():
    k, v = tokens(1)
    kv = filled().astype(jnp.bfloat16)
    got = jax.jit(kv_write)(kv, jnp.int32(0), np.array([2], np.int32), k, v)
    np.testing.assert_array_equal(got[0, 0, :, 2, :WIDTH], k[0].astype(jnp.bfloat16))


def test_as_the_carry_of_a_loop_it_is_in_place():
    """Donated KV comes back in its own memory, and no scratch holds a part of it."""

    def write_all(kv, slots, k, v):
        return jax.lax.fori_loop(0, 8, lambda layer, kv: kv_write(kv, layer, slots, k, v), kv)

    shape = api.kv_shape(8, 512, 32, 3, 64)
    k = jnp.zeros((16, 3, 64))
    lowered = jax.jit(write_all, donate_argnums=0).lower(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16), jnp.zeros(16, jnp.int32), k, k
    )
    memory = lowered.compile().memory_analysis()
    kv_bytes = 2 * int(np.prod(shape))
    assert memory.alias_size_in_bytes == kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes / 100


MODES = {
    "wait": pltpu.InterpretParams(),
    "races": pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
}


@functools.cache
def kernel(mode: str):
    return jax.jit(functools.partial(tpu.kv_write, interpret=MODES[mode]))


def equal_writes(slots: list[int], dtype: str, block_size: int, mode: str) -> None:
    """The kernel and the scatter give the same cache, whose unwritten slots are NaN."""
    kv = jnp.full((2, 4, HEADS, block_size, 2 * WIDTH), jnp.nan, jnp.float32)
    kv = kv.at[1, ::2].set(1.5).astype(dtype)
    padded = np.full(24, 4 * block_size, np.int32)
    padded[: len(slots)] = slots
    rng = np.random.default_rng(len(slots))
    values = jnp.asarray(rng.standard_normal((24, HEADS, 2 * WIDTH)) * 50).astype(dtype)
    try:
        got = kernel(mode)(kv, jnp.int32(1), padded, values)
        got = np.asarray(got.astype(jnp.float32))
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    expected = xla_write.kv_write(kv, jnp.int32(1), padded, values).astype(jnp.float32)
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=10, derandomize=True, deadline=None)
@given(slots=st.lists(st.integers(0, 2**31 - 1), max_size=24))
def test_the_tpu_kernel_writes_what_the_scatter_writes(slots):
    """Any slots in any order; a quarter of them past the end."""
    equal_writes([*dict.fromkeys(slot % 80 for slot in slots)], "float32", 16, "wait")


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [("bfloat16", 16), ("bfloat16", 48), ("int8", 64), ("float8_e4m3fn", 32)],
)
def test_the_tpu_kernel_writes_any_dtype(dtype, block_size):
    slots = [block_size - 1, 0, 3 * block_size + 1, 3 * block_size, 4 * block_size + 7, 2]
    equal_writes(slots, dtype, block_size, "wait")


def test_copies_of_the_tpu_kernel_do_not_race(capfd):
    equal_writes([*range(13, 30), 40, 0, 63], "float32", 16, "races")
    assert "RACE" not in "".join(capfd.readouterr())  # jax < 0.12 prints, newer ones raise


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_one_byte_kv_holds_the_value_over_its_scale(dtype):
    scales = np.array([[[np.nan] * 2] * HEADS, [[0.5, 2.0], [0.25, 4.0]]], np.float32)
    kv = jnp.zeros((2, 2, HEADS, 4, 2 * WIDTH), dtype)
    k, v = tokens(2)
    k[0, 0, 0], v[1, 1, 1] = 1e6, -1e6  # out of range: the largest number, not infinity
    slots = np.array([5, 0], np.int32)
    got = jax.jit(kv_write)(kv, jnp.int32(1), slots, k, v, scales)[1].astype(jnp.float32)
    top = 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)
    step = {"int8": (0.0, 0.5), "float8_e4m3fn": (1 / 16, 2**-10), "float8_e5m2": (1 / 8, 2**-17)}
    for token, slot in enumerate(slots):
        stored = np.asarray(got[slot // 4, :, slot % 4])
        for half, values in enumerate((k, v)):
            exact = np.clip(values[token] / scales[1, :, half, None], -top, top)
            relative, absolute = step[dtype]
            part = stored[:, half * WIDTH : (half + 1) * WIDTH]
            np.testing.assert_allclose(part, exact, rtol=relative, atol=absolute)


def test_one_byte_kv_without_scales_is_refused():
    kv = jnp.zeros((2, 2, HEADS, 4, 2 * WIDTH), "int8")
    with pytest.raises(ValueError, match="needs kv_scales"):
        kv_write(kv, jnp.int32(0), np.zeros(1, np.int32), *tokens(1))


def test_auto_on_a_cpu_is_the_scatter():
    slots = np.array([7, 0, SLOTS], np.int32)
    auto = jax.jit(functools.partial(kv_write, implementation="auto"))
    got = auto(filled(), jnp.int32(1), slots, *tokens(3))
    np.testing.assert_array_equal(got, kv_write(filled(), jnp.int32(1), slots, *tokens(3)))


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((HEADS, 16, 96), "bfloat16", "minor axis of 96"),
        ((HEADS, 8, 128), "bfloat16", "block_size 8 is no multiple of 16"),
        ((64, 32, 512), "int8", "64 heads needs 32 MiB of VMEM"),
    ],
)
def test_the_kernel_says_why_it_cannot(shape, dtype, reason):
    """By its name it is refused; "auto" takes the scatter."""
    kv = jax.ShapeDtypeStruct((2, 4, *shape), dtype)
    one = jax.ShapeDtypeStruct((3, shape[0], shape[2] // 2), jnp.float32)
    scales = jax.ShapeDtypeStruct((2, shape[0], 2), jnp.float32)
    arrays = (kv, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32))
    call = functools.partial(kv_write, implementation="tpu")
    with pytest.raises(ValueError, match=f"KV write kernel 'tpu': .*{reason}"):
        jax.eval_shape(call, *arrays, one, one, scales)
    call = functools.partial(kv_write, implementation="auto")
    assert jax.eval_shape(call, *arrays, one, one, scales).shape == kv.shape
