"""Joins the parts of a split softmax: plain XLA, which makes one small kernel of it."""

import jax
import jax.numpy as jnp


def combine(
    values: jax.Array,  # f32[B, parts, ..., H]  sums of exp(score - top) * v
    top: jax.Array,  # f32[B, parts, ...]  highest score
    total: jax.Array,  # f32[B, parts, ...]  sum of exp(score - top)
    used: jax.Array,  # bool, broadcast to top: the part holds something
) -> jax.Array:
    """Weighted mean f32[B, ..., H] over all parts; zero for rows without any.

    Parts that are not used may hold anything (arXiv 2205.14135, section 3.1, over blocks).
    """
    top = jnp.where(used, top, -jnp.inf)
    highest = jnp.max(top, axis=1, keepdims=True)
    weight = jnp.where(used, jnp.exp(top - jnp.where(highest == -jnp.inf, 0.0, highest)), 0.0)
    values = jnp.where(used[..., None], values, 0.0)
    total = jnp.sum(weight * jnp.where(used, total, 0.0), axis=1)
    sums = jnp.sum(weight[..., None] * values, axis=1)
    return sums / jnp.where(total == 0.0, 1.0, total)[..., None]
