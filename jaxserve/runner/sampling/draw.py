"""One random token a row, by inverse distribution function over the kept tokens in vocabulary
order.

The definition, whatever way a row takes: weights (integers, see weights.py) of the adjusted logits
over the temperature; top-k by value; top-p on the mass that is left, by weight; min-p against the
most likely token; ties at every border from the lowest id on.  One 32-bit uniform number u is drawn
for the row, and the token is the first one, in vocabulary order, at which the running mass of the
kept tokens exceeds floor(u * mass / 2^32). (The order of filters is that of transformers and
SGLang.)

A row is `narrow` when its kept tokens are among the NARROW best: top-k up to NARROW, or top-p whose
mass these hold. Other rows search the whole vocabulary.  Both ways do the same integer arithmetic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.runner.sampling import blocks as blk
from jaxserve.runner.sampling import filters
from jaxserve.runner.sampling import weights as wgt
from jaxserve.runner.sampling.blocks import Blocks
from jaxserve.runner.sampling.filters import ValueBorder, WeightBorder
from jaxserve.runner.sampling.weights import Mass

NARROW = 64  # candidates a row


class Options(NamedTuple):
    """What a row asks for; fields as in SampleInputs."""

    temperature: jax.Array  # f32[R]
    top_k: jax.Array  # i32[R]  >= vocabulary: off
    top_p: jax.Array  # f32[R]
    min_p: jax.Array  # f32[R]
    uniform: jax.Array  # u32[R]


def uniform(seed: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
    """u32[R]: one uniform number a row, from fold_in(fold_in(key(seed), sample), position) with
    threefry.

    `seed` u32[R, 2] is the low and the high half; for seeds below 2^32 the key is
    `jax.random.key(seed)`.
    """

    def one(seed: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed[::-1], impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.bits(key, (), jnp.uint32)

    return jax.vmap(one)(seed, sample, position)


def draw(
    blocks: Blocks,  # adjusted logits
    peak: jax.Array,  # f32[R]
    active: jax.Array,  # bool[R]  rows that draw; of the others the result means nothing
    x: Options,
    vocab_size: int,
) -> jax.Array:
    """i32[R]."""
    few = active & (x.top_k <= NARROW)
    nucleus = active & (x.top_k >= vocab_size) & (x.top_p < 1)

    def candidates() -> tuple[jax.Array, jax.Array]:
        values, ids = blk.top(blocks, NARROW)
        return wgt.weigh(values, peak[:, None], x.temperature[:, None]), ids

    def no_candidates() -> tuple[jax.Array, jax.Array]:
        rows, *places = blocks.values.shape
        shape = rows, min(NARROW, places[0] * places[1])
        return jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.int32)

    best, ids = lax.cond(jnp.any(few | nucleus), candidates, no_candidates)

    def only_narrow() -> jax.Array:
        nothing = wgt.single(jnp.zeros(peak.shape, jnp.uint32))
        return _narrow(best, ids, few, nothing, x)[0]

    def mixed() -> jax.Array:
        values = wgt.to_groups(blocks.values)
        weights = wgt.weigh(values, wgt.each(peak), wgt.each(x.temperature))
        weights = lax.optimization_barrier(weights)  # computed once: all readers see the same bits
        mass = wgt.group_mass(weights)
        token, covered = _narrow(best, ids, few, wgt.add_up(mass), x)
        wide = active & ~few & ~(nucleus & covered)
        return lax.cond(
            jnp.any(wide),
            lambda: jnp.where(wide, _wide(values, peak, weights, mass, wide, x, vocab_size), token),
            lambda: token,
        )

    return lax.cond(jnp.any(active & ~few), mixed, only_narrow)


def _narrow(
    weights: jax.Array,  # u32[R, K]  of the K best tokens, best first
    ids: jax.Array,  # i32[R, K]
    few: jax.Array,  # bool[R]  top-k is on and at most K
    whole: Mass,  # [R]  mass of the vocabulary
    x: Options,
) -> tuple[jax.Array, jax.Array]:
    """The token of each row (i32[R]), and whether the K tokens hold all that top-p keeps
    (bool[R]).
    """
    count = weights.shape[1]
    weights = jnp.where(few[:, None] & (jnp.arange(count) >= x.top_k[:, None]), 0, weights)
    mass = wgt.choose(few, wgt.total(weights), whole)
    target = filters.wanted(mass, x.top_p)
    mine, other = weights[:, :, None], weights[:, None, :]
    earlier = ids[:, None, :] < ids[:, :, None]
    before = wgt.total(jnp.where((other > mine) | ((other == mine) & earlier), other, 0))
    inside = ~wgt.at_most(wgt.column(target), before) | (few & (x.top_p >= 1))[:, None]
    # a token outside may weigh as much as the last candidate, and have a lower id
    strictly = weights > weights[:, -1:]
    covered = few | wgt.at_most(target, wgt.total(jnp.where(strictly, weights, 0)))
    kept = jnp.where(inside & (weights >= filters.min_p_floor(x.min_p)[:, None]), weights, 0)
    rank = wgt.scale(wgt.total(kept), x.uniform)
    other = kept[:, None, :]
    passed = wgt.total(jnp.where(ids[:, None, :] <= ids[:, :, None], other, 0))
    reached = ~wgt.at_most(passed, wgt.column(rank)) & (kept > 0)
    last = jnp.iinfo(jnp.int32).max
    return jnp.where(reached, ids, last).min(axis=1), covered


def _wide(
    values: jax.Array,  # f32[R, groups, DEPTH, LANES]
    peak: jax.Array,  # f32[R]
    weights: jax.Array,  # u32[R, groups, DEPTH, LANES]
    mass: Mass,  # [R, groups]
    wide: jax.Array,  # bool[R]
    x: Options,
    vocab_size: int,
) -> jax.Array:
    """i32[R]: the token of each row, with the whole vocabulary searched."""
    limited = wide & (x.top_k < vocab_size)
    nucleus = wide & (x.top_p < 1)
    least = wide & (x.min_p > 0)

    every = jnp.full(wide.shape, jnp.iinfo(jnp.int32).max, jnp.int32)

    def first_k() -> ValueBorder:
        return filters.top_k(values, peak, x.temperature, x.top_k, limited)

    def all_values() -> ValueBorder:
        return ValueBorder(jnp.full(wide.shape, -jnp.inf), every)

    def filtered() -> jax.Array:
        kept = lax.cond(jnp.any(limited), first_k, all_values).keep(values, weights)
        kept = lax.optimization_barrier(kept)

        def first_p() -> WeightBorder:
            whole = wgt.add_up(wgt.group_mass(kept))
            return filters.top_p(kept, whole, filters.wanted(whole, x.top_p), nucleus)

        def all_weights() -> WeightBorder:
            return WeightBorder(jnp.zeros(wide.shape, jnp.uint32), every)

        kept = lax.cond(jnp.any(nucleus), first_p, all_weights).keep(kept)
        kept = jnp.where(kept >= wgt.each(filters.min_p_floor(x.min_p)), kept, 0)
        kept = lax.optimization_barrier(kept)
        return _pick(kept, wgt.group_mass(kept), x.uniform)

    return lax.cond(
        jnp.any(limited | nucleus | least), filtered, lambda: _pick(weights, mass, x.uniform)
    )


def _pick(weights: jax.Array, mass: Mass, uniform: jax.Array) -> jax.Array:
    return wgt.pick(weights, mass, wgt.scale(wgt.add_up(mass), uniform))
