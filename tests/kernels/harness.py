"""What the tests of every attention kernel share: a case run by a kernel, and what it must give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import plan, reference
from pallas_kernels.ragged_paged_attention.cases import Case, Inputs, Shape, make_inputs

LAYER = 1  # of 3; the others hold NaN, so a wrong layer shows
KV_LENGTH = 704  # the longest context of any case
SCALES = np.linspace(0.02, 0.05, 64, dtype=np.float32)


def padded(case: Case, tokens: int, rows: int, length: int = KV_LENGTH) -> Shape:
    """One shape for many cases, so that they share a program."""
    table = -(-length // case.block_size)
    return Shape(tokens, rows, table, 3 * table)


def fits(case: Case, shape: Shape) -> bool:
    """Whether the case's arrays need no more than the shape."""
    made = make_inputs(case)
    size = Shape(len(made.q), len(made.kv_lens), made.block_tables.shape[1], len(made.k))
    return all(need <= have for need, have in zip(size, shape, strict=True))


def poison(inputs: Inputs) -> Inputs:
    """Ids of no block wherever a table may hold anything: a kernel must not follow them."""
    tables = inputs.block_tables.copy()
    size = inputs.k.shape[1]
    for row, length in enumerate(inputs.kv_lens):
        past = np.arange(tables.shape[1]) >= -(-int(length) // size)
        tables[row, past] = np.where(np.arange(past.sum()) % 2, -1, 2**31 - 1)
    return inputs._replace(block_tables=tables)


def stored(inputs: Inputs, dtype: str) -> tuple[jax.Array, np.ndarray | None]:
    """The KV of 3 layers, and the scales f32[3, K, 2] of one-byte dtypes.

    One-byte integers know no NaN: what nobody wrote holds the largest number.
    """
    both = np.concatenate([inputs.k, inputs.v], -1).transpose(0, 2, 1, 3)
    kind = jnp.dtype(dtype)
    if kind.itemsize > 1:
        return jnp.full((3, *both.shape), jnp.nan, kind).at[LAYER].set(both.astype(kind)), None
    kv_heads, width = inputs.k.shape[2:]
    scales = np.stack([SCALES[:kv_heads], SCALES[-kv_heads:]], -1)
    per_lane = np.repeat(scales, width, axis=1)[:, None]  # [K, 1, 2H]
    values = both / per_lane
    if dtype == "int8":
        values = np.where(np.isnan(both), 127, np.clip(np.round(values), -127, 127))
    values = jnp.asarray(values, jnp.float32).astype(kind)
    kv = jnp.full((3, *both.shape), 127, kind).at[LAYER].set(values)
    return kv, np.where(np.arange(3)[:, None, None] == LAYER, scales, np.nan).astype(np.float32)


def operands(inputs: Inputs, dtype: str, kv_dtype: str) -> tuple[Any, ...]:
    """q, kv, layer, tables, starts, lens, decodes, scales for `attend`."""
    kv, scales = stored(inputs, kv_dtype)
    return (jnp.asarray(inputs.q, dtype), kv, jnp.int32(LAYER), *inputs[3:], scales)


def want(case: Case, inputs: Inputs, dtype: str, kv_dtype: str) -> np.ndarray:
    """The reference on the very values that the back end sees."""
    kv, scales = stored(inputs, kv_dtype)
    seen = np.asarray(kv[LAYER].astype(jnp.float32)).transpose(0, 2, 1, 3)
    k, v = np.split(seen, 2, axis=-1)
    q = np.asarray(jnp.asarray(inputs.q, dtype).astype(jnp.float32))
    blocks = np.clip(inputs.block_tables, 0, len(k) - 1)
    factors = None if scales is None else scales[LAYER]
    return reference.ragged_paged_attention(
        q,
        k,
        v,
        blocks,
        *inputs[4:6],
        window=case.window,
        soft_cap=case.soft_cap,
        scale=case.scale,
        kv_scales=factors,
    )


def attend(kernel: Any, case: Case, *arrays: Any, **how: Any) -> jax.Array:
    """A kernel module's attention with the options of the case; the window is the last array."""
    q, kv, layer, tables, starts, lens, decodes, scales, window = arrays
    scale = float(q.shape[-1] ** -0.5) if case.scale is None else case.scale
    mask = plan.Mask(window, case.soft_cap, scale)
    rows = plan.Rows(tables, starts, lens, decodes[0])
    factors = None if scales is None else scales[layer]
    return kernel.ragged_paged_attention(q, kv, layer, rows, mask, factors, **how)


def window_of(case: Case) -> np.ndarray:
    """As an array: one program for all windows, and for none."""
    return np.int32(plan.NO_WINDOW if case.window is None else case.window)


@st.composite
def batches(draw: Any) -> Case:
    """Any ragged batch of up to 8 rows, with empty rows between the chunks."""
    decodes = draw(st.lists(st.integers(1, 150), max_size=4))
    chunks = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 75)), max_size=4))
    rows = (*((1, length) for length in decodes), *((n, n + before) for n, before in chunks))
    window = draw(st.sampled_from([None, 1, 24, 64]))
    return Case("drawn", rows, len(decodes), window=window, pad_tokens=0, pad_rows=0)
