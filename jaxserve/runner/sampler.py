"""Sampling: from the logits of R rows to one token each.

Pure functions over fixed shapes; every option is an array with a neutral value.  A row's token
depends on its own logits and options only: not on the rows beside it, their number, or the program
(a greedy row of `full` or `random` gets the token of `greedy`).  Order: repetition, presence and
frequency penalties, logit bias, min_tokens; then temperature, top-k, top-p, min-p.  `vocab_size` is
static: ids from there on (a padded head) cannot be drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch.step import SampleInputs
from jaxserve.request import GREEDY_TEMPERATURE
from jaxserve.runner.sampling import blocks as blk
from jaxserve.runner.sampling.blocks import Blocks
from jaxserve.runner.sampling.draw import Options, draw, uniform
from jaxserve.runner.sampling.logprobs import logprobs
from jaxserve.runner.sampling.penalties import add_counts, adjust, seed_counts

__all__ = ["Sampled", "add_counts", "full", "greedy", "logprobs", "random", "seed_counts"]


class Sampled(NamedTuple):
    """One token a row."""

    tokens: jax.Array  # i32[R]   0 where bad
    bad: jax.Array  # bool[R]  the row's logits were not finite, or its options left no token


def greedy(logits: jax.Array, vocab_size: int) -> Sampled:
    """The most likely token of each row of `logits` [R, V]; of equal ones the lowest id."""
    token, peak = blk.best(blk.to_blocks(logits, vocab_size))
    return _sampled(token, peak, _broken(logits, vocab_size))


def random(logits: jax.Array, x: SampleInputs, vocab_size: int) -> Sampled:
    """Temperature, top-k, top-p and min-p; `logits` [R, V]."""
    return _sample(blk.to_blocks(logits, vocab_size), _broken(logits, vocab_size), x, vocab_size)


def full(logits: jax.Array, counts: jax.Array, x: SampleInputs, vocab_size: int) -> Sampled:
    """Every option; `logits` [R, V], `counts` i32[R, V] the token counts of the rows' seats."""
    adjusted = adjust(logits.astype(jnp.float32), counts, x)
    return _sample(blk.to_blocks(adjusted, vocab_size), _broken(logits, vocab_size), x, vocab_size)


def _sample(blocks: Blocks, broken: jax.Array, x: SampleInputs, vocab_size: int) -> Sampled:
    token, peak = blk.best(blocks)
    active = (x.temperature >= GREEDY_TEMPERATURE) & ~broken & (peak > -jnp.inf)

    def drawn() -> jax.Array:
        options = Options(
            temperature=jnp.where(active, x.temperature, 1.0),
            top_k=jnp.where(x.top_k > 0, x.top_k, vocab_size),
            top_p=x.top_p,
            min_p=x.min_p,
            uniform=uniform(x.seed, x.sample, x.position),
        )
        return jnp.where(active, draw(blocks, peak, active, options, vocab_size), token)

    return _sampled(lax.cond(jnp.any(active), drawn, lambda: token), peak, broken)


def _sampled(token: jax.Array, peak: jax.Array, broken: jax.Array) -> Sampled:
    bad = broken | ~(peak > -jnp.inf)
    return Sampled(jnp.where(bad, 0, token), bad)


def _broken(logits: jax.Array, vocab_size: int) -> jax.Array:
    """bool[R]: some logit below `vocab_size` is infinite or not a number.

    A plain sum is the fastest reduction there is, and finite for all but strange rows; a maximum
    would lose a NaN.
    """
    strange = ~jnp.isfinite(logits.astype(jnp.float32).sum(axis=1))

    def look() -> jax.Array:
        inside = jnp.arange(logits.shape[1]) < vocab_size
        return jnp.any(~jnp.isfinite(logits) & inside, axis=1)

    return lax.cond(jnp.any(strange), look, lambda: strange)
