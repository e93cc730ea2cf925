"""Options that change logits before anything is drawn, and the token counts that penalties need.

`counts` i32[seats, V] holds in one number what a request's tokens were: bit 0 says that the token
occurs in the prompt, the rest is how often it occurs in the output.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxserve.batch.step import SampleInputs

_PROMPT = 1
_OUTPUT = 2


def seed_counts(
    counts: jax.Array,  # i32[seats, V], donated
    seat: jax.Array,  # i32[]
    tokens: jax.Array,  # i32[M]  >= V for padding
    is_prompt: jax.Array,  # bool[M]  prompt or output
    first: jax.Array,  # bool[]  this is the first slice: forget what the seat held
) -> jax.Array:
    """`counts` after one slice of a request's tokens; slices may come in any order after the
    first.
    """
    vocab = counts.shape[1]
    nothing = jnp.zeros(vocab, jnp.int32)
    flag = nothing.at[tokens].max(jnp.where(is_prompt, _PROMPT, 0), mode="drop")
    output = nothing.at[tokens].add(jnp.where(is_prompt, 0, _OUTPUT), mode="drop")
    row = jnp.where(first, 0, lax.dynamic_index_in_dim(counts, seat, keepdims=False))
    return lax.dynamic_update_index_in_dim(counts, (row | flag) + output, seat, 0)


def add_counts(
    counts: jax.Array,  # i32[seats, V], donated
    seats: jax.Array,  # i32[R]  >= seats for padding
    tokens: jax.Array,  # i32[R]
) -> jax.Array:
    """`counts` with one more output token for each of `seats`."""
    return counts.at[seats, tokens].add(_OUTPUT, mode="drop")


def adjust(logits: jax.Array, counts: jax.Array, x: "SampleInputs") -> jax.Array:
    """f32[R, V]: `logits` f32[R, V] after every option that changes them, in this order.

    Repetition penalty (prompt and output tokens: positive values divided, negative ones multiplied;
    CTRL, arXiv 1909.05858, 4.1), presence and frequency penalty (output tokens), logit bias, and
    -inf for stop ids while `suppress_stops`.  `counts` i32[R, V] are those of the rows' seats.
    """
    repetition = x.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    output = counts // _OUTPUT
    values = jnp.where(counts > 0, repeated, logits)
    values = values - x.frequency[:, None] * output.astype(jnp.float32)
    values = values - jnp.where(output > 0, x.presence[:, None], 0.0)
    largest = jnp.finfo(jnp.float32).max
    return _add_entries(jnp.clip(values, -largest, largest), x)


def _add_entries(values: jax.Array, x: "SampleInputs") -> jax.Array:
    """`values` with the bias of single tokens, one entry of all rows at a time, in place; no round
    is spent on entries that no row uses."""
    rows, vocab = values.shape
    stops = jnp.where(x.suppress_stops[:, None], x.stop_ids, vocab)
    ids = jnp.concatenate([stops, x.bias_ids], axis=1).T
    bias = jnp.concatenate([jnp.full(stops.shape, -jnp.inf), x.bias], axis=1).T
    used = jnp.any(ids < vocab, axis=1)
    entries = jnp.where(used, jnp.arange(1, len(ids) + 1), 0)
    first, end = jnp.where(used, entries - 1, len(ids)).min(), entries.max()
    largest = jnp.finfo(jnp.float32).max

    def add(entry: jax.Array, values: jax.Array) -> jax.Array:
        token = ids[entry]
        value = values[jnp.arange(rows), jnp.minimum(token, vocab - 1)] + bias[entry]
        return values.at[jnp.arange(rows), token].set(jnp.minimum(value, largest), mode="drop")

    return lax.fori_loop(first, end, add, values)
