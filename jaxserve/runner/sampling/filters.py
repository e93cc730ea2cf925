"""Borders of top-k, top-p and min-p over a whole vocabulary.

Nothing here sorts the vocabulary.  The border of a kept set is found by trying thresholds, ties at
the border are kept from the lowest id on.  The kept set does not depend on the thresholds tried,
and a row that is done waits, unchanged, for the others: it depends on that row alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.runner.sampling import weights as wgt
from jaxserve.runner.sampling.weights import Mass

_NEGLIGIBLE = 19.0  # exp(-19) is below half a unit of weight


def wanted(mass: Mass, top_p: jax.Array) -> Mass:
    """The mass that top-p has to reach: `top_p` of `mass`, at least 1, so that a token survives."""
    share = (jnp.clip(top_p, 0.0, 1.0 - 2.0**-24) * 2.0**32).astype(jnp.uint32)
    part = wgt.scale(mass, share)
    nothing = (part.high == 0) & (part.low == 0)
    return Mass(part.high, jnp.where(nothing, 1, part.low))


def min_p_floor(min_p: jax.Array) -> jax.Array:
    """u32: the least weight that min-p keeps; never above that of the most likely token."""
    return jnp.minimum((jnp.clip(min_p, 0.0, 1.0) * 2.0**26).astype(jnp.uint32), wgt.ONE)


class ValueBorder(NamedTuple):
    """What top-k keeps: all above `value`, and those equal to it up to id `last`."""

    value: jax.Array  # f32[R]
    last: jax.Array  # i32[R]

    def keep(self, values: jax.Array, weights: jax.Array) -> jax.Array:
        """`weights` of the kept ones of `values`, 0 for the others."""
        edge, last = wgt.each(self.value), wgt.each(self.last)
        tied = (values == edge) & (wgt.token_ids(values) <= last)
        return jnp.where((values > edge) | tied, weights, 0)


class WeightBorder(NamedTuple):
    """What top-p keeps: all heavier than `weight`, and those as heavy up to id `last`."""

    weight: jax.Array  # u32[R]
    last: jax.Array  # i32[R]

    def keep(self, weights: jax.Array) -> jax.Array:
        """The kept ones of `weights`, 0 for the others."""
        edge, last = wgt.each(self.weight), wgt.each(self.last)
        tied = (weights == edge) & (wgt.token_ids(weights) <= last)
        return jnp.where((weights > edge) | tied, weights, 0)


def top_k(
    values: jax.Array,  # f32[R, groups, DEPTH, LANES]  adjusted logits
    peak: jax.Array,  # f32[R]
    temperature: jax.Array,  # f32[R]
    count: jax.Array,  # i32[R]  below the vocabulary where `rows`
    rows: jax.Array,  # bool[R]  rows to filter; the others keep everything
) -> ValueBorder:
    """Border of the `count` highest values; not exact among tokens that weigh nothing."""
    low = _key(jnp.maximum(peak - _NEGLIGIBLE * temperature, jnp.finfo(jnp.float32).min))
    low = jnp.where(rows, low, 0)
    high = jnp.where(rows, _key(peak) + 1, 1)

    def probe(key: jax.Array) -> "_Probe":
        found = wgt.count(values >= wgt.each(_value(key)))
        return _Probe(found >= count, found == count, jnp.log1p(found.astype(jnp.float32)))

    goal = jnp.log1p(count.astype(jnp.float32))
    most = jnp.full_like(goal, jnp.log1p(float(values[0].size)))
    bounds = _Bounds(low, high, most, jnp.zeros_like(goal), ~rows)
    key, exact = _search(bounds, goal, probe, _Scale(_value, _key, _halfway))
    border = _value(key)

    def last_tie() -> jax.Array:
        ties = (values == wgt.each(border)).astype(jnp.uint32)
        missing = jnp.maximum(count - wgt.count(values > wgt.each(border)), 1).astype(jnp.uint32)
        return wgt.pick(ties, wgt.group_mass(ties), wgt.single(missing - 1))

    return ValueBorder(jnp.where(rows, border, -jnp.inf), _last_tie(exact, last_tie))


def top_p(
    weights: jax.Array,  # u32[R, groups, DEPTH, LANES]
    mass: Mass,  # [R]  of `weights`
    target: Mass,  # [R]  at least 1, at most `mass`
    rows: jax.Array,  # bool[R]  rows to filter; the others keep everything
) -> WeightBorder:
    """Border of the heaviest tokens, as few as reach `target`."""

    def heavier(edge: jax.Array) -> Mass:
        inside = jnp.where(weights >= wgt.each(edge), weights, 0)
        return wgt.add_up(wgt.group_mass(inside))

    def probe(edge: jax.Array) -> "_Probe":
        found = heavier(edge)
        reached = wgt.at_most(target, found)
        # no token weighs less than `edge`: without any one of them the target would be missed
        exact = reached & ~wgt.at_most(wgt.single(edge), wgt.minus(found, target))
        return _Probe(reached, exact, wgt.to_float(found))

    low = jnp.zeros(rows.shape, jnp.uint32)
    high = jnp.where(rows, jnp.uint32(wgt.ONE + 1), 1)
    whole = wgt.to_float(mass)
    bounds = _Bounds(low, high, whole, jnp.zeros_like(whole), ~rows)
    scale = _Scale(_log, _exp, lambda low, high: _exp((_log(low) + _log(high)) / 2))
    border, exact = _search(bounds, wgt.to_float(target), probe, scale)

    def last_tie() -> jax.Array:
        ties = jnp.where(weights == wgt.each(border), weights, 0)
        nothing = wgt.single(jnp.zeros_like(border))
        missing = wgt.minus(target, wgt.choose(exact, nothing, heavier(border + 1)))
        rank = wgt.minus(missing, wgt.single(jnp.ones_like(border)))
        return wgt.pick(ties, wgt.group_mass(ties), rank)

    return WeightBorder(jnp.where(rows, border, 0), _last_tie(exact, last_tie))


class _Scale(NamedTuple):
    """A scale on which what is measured runs more evenly than over keys."""

    of_key: Callable[[jax.Array], jax.Array]  # u32 -> f32
    to_key: Callable[[jax.Array], jax.Array]  # f32 -> u32
    middle: Callable[[jax.Array, jax.Array], jax.Array]  # a key between two, halving their distance


class _Probe(NamedTuple):
    """What a threshold keeps."""

    enough: jax.Array  # bool[R]
    exact: jax.Array  # bool[R]  enough, and not one token too many
    measure: jax.Array  # f32[R]


class _Bounds(NamedTuple):
    """The border lies in [low, high): `low` keeps enough, `high` does not."""

    low: jax.Array  # u32[R]
    high: jax.Array  # u32[R]
    low_measure: jax.Array  # f32[R]
    high_measure: jax.Array  # f32[R]
    exact: jax.Array  # bool[R]


def _search(
    bounds: _Bounds,
    goal: jax.Array,  # f32[R]  measure to reach
    probe: Callable[[jax.Array], _Probe],
    scale: _Scale,
) -> tuple[jax.Array, jax.Array]:
    """The border u32[R]: the largest key that keeps enough, or any key that keeps exactly enough
    (bool[R] says which).  Thresholds are interpolated, and their distance is halved in every second
    round, which bounds the rounds by about twice the bits of a key."""

    def unfinished(state: tuple[jax.Array, _Bounds]) -> jax.Array:
        return jnp.any(state[1].high - state[1].low > 1)

    def narrow(state: tuple[jax.Array, _Bounds]) -> tuple[jax.Array, _Bounds]:
        turn, b = state
        done = b.high - b.low <= 1
        share = (b.low_measure - goal) / (b.low_measure - b.high_measure)
        start, end = scale.of_key(b.low), scale.of_key(b.high)
        guess = scale.to_key(start + jnp.clip(share, 0.0, 1.0) * (end - start))
        guess = jnp.where(turn % 2 == 0, guess, scale.middle(b.low, b.high))
        key = jnp.clip(guess, b.low + 1, b.high - 1)
        found = probe(key)
        up, hit = ~done & found.enough, ~done & found.exact
        down = ~done & ~found.enough
        return turn + 1, _Bounds(
            low=jnp.where(up, key, b.low),
            high=jnp.where(hit, key + 1, jnp.where(down, key, b.high)),
            low_measure=jnp.where(up, found.measure, b.low_measure),
            high_measure=jnp.where(down, found.measure, b.high_measure),
            exact=b.exact | hit,
        )

    _, found = lax.while_loop(unfinished, narrow, (jnp.int32(0), bounds))
    return found.low, found.exact


def _last_tie(exact: jax.Array, find: Callable[[], jax.Array]) -> jax.Array:
    """i32[R]: the last id kept among ties at the border; all of them where `exact`."""
    every = jnp.full(exact.shape, jnp.iinfo(jnp.int32).max, jnp.int32)
    return lax.cond(jnp.all(exact), lambda: every, lambda: jnp.where(exact, every, find()))


def _halfway(low: jax.Array, high: jax.Array) -> jax.Array:
    return low + (high - low) // 2


def _key(value: jax.Array) -> jax.Array:
    """u32 that orders like the float32 `value`."""
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(2**31))


def _value(key: jax.Array) -> jax.Array:
    """Inverse of `_key`."""
    bits = jnp.where(key >> 31, key & jnp.uint32(2**31 - 1), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _log(key: jax.Array) -> jax.Array:
    return jnp.log(jnp.maximum(key.astype(jnp.float32), 0.5))


def _exp(value: jax.Array) -> jax.Array:
    return jnp.exp(value).astype(jnp.uint32)
