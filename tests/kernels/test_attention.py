"""Laws of the attention of every back end: it equals the dense reference on any ragged batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import api, reference
from pallas_kernels.ragged_paged_attention.cases import CASES, Case, Inputs, make_inputs

LAYER = 1  # of 3; the others hold NaN, so a wrong layer shows
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))


def _kv(inputs: Inputs, dtype: str):
    blocks, block_size, kv_heads, width = inputs.k.shape
    kv = api.init_kv(api.kv_shape(3, blocks, block_size, kv_heads, width), dtype)
    kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv)
    both = np.concatenate([inputs.k, inputs.v], -1).transpose(0, 2, 1, 3)
    return kv.at[LAYER].set(both.astype(kv.dtype))


@functools.partial(jax.jit, static_argnames=("block_size", "window", "soft_cap", "scale"))
def _attention(q, kv, tables, starts, lens, num_decodes, **options):
    return api.ragged_paged_attention(
        q, kv, jnp.int32(LAYER), tables, starts, lens, num_decodes, **options
    )


def _both(case: Case, dtype: str, *, seed: int = 0, longest: int = 0):
    inputs = make_inputs(case, seed=seed, longest=longest)
    options = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.scale}
    got = _attention(
        jnp.asarray(inputs.q, dtype),
        _kv(inputs, dtype),
        *inputs[3:],
        block_size=case.block_size,
        **options,
    )
    want = reference.ragged_paged_attention(
        *(_rounded(x, dtype) for x in inputs[:3]), *inputs[3:6], **options
    )
    return np.asarray(got.astype(jnp.float32)), want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case, dtype):
    got, want = _both(case, dtype)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype])
