"""Top-k, top-p and min-p as functions from weights to weights: what is not kept gets weight 0.

Nothing here sorts the vocabulary.  The border of a kept set is found by bisection, ties at the
border are kept from the lowest id on, and a row's border depends on that row alone: rows that are
done wait, unchanged, for the others.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.runner.sampling import blocks as blk
from jaxserve.runner.sampling import weights as wgt
from jaxserve.runner.sampling.weights import Mass

_NEGLIGIBLE = 19.0  # exp(-19) is below half a unit of weight


def fraction(share: jax.Array) -> jax.Array:
    """u32: `share` in [0, 1) in units of 2^-32."""
    clipped = jnp.clip(share, 0.0, 1.0 - 2.0**-24)
    return (clipped * 2.0**32).astype(jnp.uint32)


def wanted(mass: Mass, top_p: jax.Array) -> Mass:
    """The mass that top-p has to reach: `top_p` of `mass`, at least one unit, so that a token
    survives.
    """
    part = wgt.scale(mass, fraction(top_p))
    nothing = (part.high == 0) & (part.low == 0)
    return Mass(part.high, jnp.where(nothing, 1, part.low))


def min_p_floor(min_p: jax.Array) -> jax.Array:
    """u32: the least weight that min-p keeps; never above that of the most likely token."""
    return jnp.minimum((jnp.clip(min_p, 0.0, 1.0) * 2.0**26).astype(jnp.uint32), wgt.ONE)


def top_k(
    weights: jax.Array,  # u32[R, blocks, BLOCK]
    values: jax.Array,  # f32[R, blocks, BLOCK]  adjusted logits
    peak: jax.Array,  # f32[R]
    temperature: jax.Array,  # f32[R]
    count: jax.Array,  # i32[R]  >= vocabulary: off
) -> jax.Array:
    """Keeps the `count` tokens of the highest values.  Below a weight of half a unit the border is
    not exact: such tokens weigh nothing anyway."""
    low = _key(jnp.maximum(peak - _NEGLIGIBLE * temperature, jnp.finfo(jnp.float32).min))
    high = _key(peak) + 1

    def holds(key: jax.Array) -> jax.Array:
        return _count(values >= _value(key)[:, None, None]) >= count

    border = _value(_largest(low, high, holds))[:, None, None]
    ties = (values == border).astype(jnp.uint32)
    missing = jnp.maximum(count - _count(values > border), 1).astype(jnp.uint32) - 1
    rank = Mass(missing >> 16, missing & 0xFFFF)
    last = wgt.pick(wgt.block_sums(ties), lambda block: blk.at(ties, block), rank)
    kept = (values > border) | ((values == border) & (blk.token_ids(values) <= last[:, None, None]))
    return jnp.where(kept, weights, 0)


def top_p(weights: jax.Array, target: Mass) -> jax.Array:
    """Keeps the heaviest tokens of u32[R, blocks, BLOCK], as few as reach `target` (at least 1, at
    most all).
    """
    rows = len(weights)

    def reached(border: jax.Array, *, strict: bool) -> Mass:
        edge = border[:, None, None]
        inside = weights > edge if strict else weights >= edge
        return wgt.total(wgt.block_sums(jnp.where(inside, weights, 0)))

    low = jnp.zeros(rows, jnp.uint32)
    high = jnp.full(rows, wgt.ONE + 1, jnp.uint32)
    border = _largest(low, high, lambda edge: wgt.at_most(target, reached(edge, strict=False)))
    edge = border[:, None, None]
    ties = jnp.where(weights == edge, weights, 0)
    missing = wgt.minus(target, reached(border, strict=True))
    rank = wgt.minus(missing, Mass(jnp.zeros(rows, jnp.uint32), jnp.ones(rows, jnp.uint32)))
    last = wgt.pick(wgt.block_sums(ties), lambda block: blk.at(ties, block), rank)
    kept = (weights > edge) | ((weights == edge) & (blk.token_ids(weights) <= last[:, None, None]))
    return jnp.where(kept, weights, 0)


def _largest(low: jax.Array, high: jax.Array, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """u32[R]: the largest key in [low, high) for which `holds`; it holds for `low`, and for no key
    after the first for which it does not."""

    def open_(bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(bounds[1] - bounds[0] > 1)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        above = holds(middle) | (middle == low)
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    return lax.while_loop(open_, halve, (low, high))[0]


def _count(flags: jax.Array) -> jax.Array:
    return flags.sum(axis=2, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def _key(value: jax.Array) -> jax.Array:
    """u32 that orders like the float32 `value`."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(2**31))


def _value(key: jax.Array) -> jax.Array:
    """Inverse of `_key`."""
    bits = jnp.where(key >> 31, key & jnp.uint32(2**31 - 1), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)
