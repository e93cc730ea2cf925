"""Laws of the KV write: each token in its slot, nothing else touched, nothing copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
