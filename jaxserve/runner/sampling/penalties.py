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
    """f32[R, V]: `logits` f32[R, V] after repetition penalty (prompt and output tokens: positive
    values divided, negative ones multiplied; CTRL, arXiv 1909.05858, 4.1), presence and frequency
    penalty (output tokens), logit bias, and -inf for stop ids while `suppress_stops`, in this
    order.  `counts` i32[R, V] are the rows' seats.
    """

    def penalised() -> jax.Array:
        repetition = x.repetition[:, None]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        values = jnp.where(counts > 0, repeated, logits)
        output = (counts // _OUTPUT).astype(jnp.float32)
        values = values - x.frequency[:, None] * output
        return values - jnp.where(output > 0, x.presence[:, None], 0.0)

    rows = jnp.arange(len(logits))[:, None]
    vocab = logits.shape[1]
    penalties = (x.repetition != 1) | (x.presence != 0) | (x.frequency != 0)
    values = lax.cond(jnp.any(penalties), penalised, lambda: logits)
    values = lax.cond(
        jnp.any(x.bias_ids < vocab),
        lambda values: values.at[rows, x.bias_ids].add(x.bias, mode="drop"),
        lambda values: values,
        values,
    )
    stops = jnp.where(x.suppress_stops[:, None], x.stop_ids, vocab)
    values = lax.cond(
        jnp.any(x.suppress_stops),
        lambda values: values.at[rows, stops].set(-jnp.inf, mode="drop"),
        lambda values: values,
        values,
    )
    return jnp.minimum(values, jnp.finfo(jnp.float32).max)
