"""Probabilities as integers.

A token's weight is its probability relative to the most likely token, in units of 2^-26.  Sums of
integers are the same in every order, so masses, and with them the drawn token, depend neither on
the number of rows nor on how the compiler arranges a reduction, and two ways to the same sum agree
to the last bit.  A mass goes beyond 32 bits: it is held as two uint32, `high * 2^16 + low`.

Weights of a whole vocabulary lie in groups, [R, groups, DEPTH, LANES] in id order: sums over DEPTH
run along the lanes of a vector unit and cannot overflow 32 bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ONE = 2**26 - 1  # weight of the most likely token
DEPTH, LANES = 32, 128
_DIGIT = 16
_MASK = 2**_DIGIT - 1


class Mass(NamedTuple):
    """Sum of weights, `high * 2^16 + low`, low < 2^16; exact for more than 2^20 tokens."""

    high: jax.Array  # u32
    low: jax.Array  # u32


def to_groups(values: jax.Array) -> jax.Array:
    """f32[R, groups, DEPTH, LANES] of f32[R, ...] in id order, -inf past the end."""
    flat = values.reshape(len(values), -1)
    spare = -flat.shape[1] % (DEPTH * LANES)
    if spare:
        flat = jnp.pad(flat, ((0, 0), (0, spare)), constant_values=-jnp.inf)
    return flat.reshape(len(flat), -1, DEPTH, LANES)


def token_ids(groups: jax.Array) -> jax.Array:
    """i32[groups, DEPTH, LANES]: the token id of each place."""
    shape = groups.shape[1:]
    return jnp.arange(shape[0] * DEPTH * LANES, dtype=jnp.int32).reshape(shape)


def each(row_values: jax.Array) -> jax.Array:
    """[R] as [R, 1, 1, 1], to meet groups."""
    return row_values[:, None, None, None]


def weigh(values: jax.Array, peak: jax.Array, temperature: jax.Array) -> jax.Array:
    """u32 weights of `values` (broadcast against the row's `peak` and `temperature`)."""
    scaled = jnp.exp((values - peak) / temperature) * 2.0**26
    return jnp.minimum((scaled + 0.5).astype(jnp.int32), ONE).astype(jnp.uint32)


def group_mass(weights: jax.Array) -> Mass:
    """Mass [R, groups] of u32[R, groups, DEPTH, LANES]."""
    return total(weights.sum(axis=2, dtype=jnp.uint32))


def count(flags: jax.Array) -> jax.Array:
    """i32[R]: how many of bool[R, groups, DEPTH, LANES] are set."""
    parts = lax.optimization_barrier(flags.sum(axis=2, dtype=jnp.int32))  # one step would not fuse
    return parts.sum(axis=(1, 2), dtype=jnp.int32)


def total(weights: jax.Array) -> Mass:
    """Mass [...] of u32[..., n]."""
    return add_up(Mass(weights >> _DIGIT, weights & _MASK))


def add_up(mass: Mass) -> Mass:
    """Mass [...] of Mass [..., n]."""
    return _carry(*(part.sum(axis=-1, dtype=jnp.uint32) for part in mass))


def at_most(a: Mass, b: Mass) -> jax.Array:
    """bool: a <= b."""
    return (a.high < b.high) | ((a.high == b.high) & (a.low <= b.low))


def minus(a: Mass, b: Mass) -> Mass:
    """a - b, for b <= a."""
    borrow = (a.low < b.low).astype(jnp.uint32)
    return Mass(a.high - b.high - borrow, (a.low - b.low) & _MASK)


def single(value: jax.Array) -> Mass:
    """Mass of u32."""
    return Mass(value >> _DIGIT, value & _MASK)


def column(mass: Mass) -> Mass:
    """[R, 1] of [R]."""
    return Mass(mass.high[:, None], mass.low[:, None])


def choose(condition: jax.Array, a: Mass, b: Mass) -> Mass:
    """Per row, `a` where `condition`, else `b`."""
    return Mass(jnp.where(condition, a.high, b.high), jnp.where(condition, a.low, b.low))


def to_float(mass: Mass) -> jax.Array:
    """About the mass, f32."""
    return mass.high.astype(jnp.float32) * 2.0**_DIGIT + mass.low.astype(jnp.float32)


def scale(mass: Mass, fraction: jax.Array) -> Mass:
    """floor(mass * fraction / 2^32), `fraction` u32: long multiplication in digits of 16 bits."""
    digits = (mass.low, mass.high & _MASK, mass.high >> _DIGIT)
    columns = [jnp.zeros_like(mass.low)] * 6
    for i, a in enumerate(digits):
        for j, b in enumerate((fraction & _MASK, fraction >> _DIGIT)):
            product = a * b
            columns[i + j] += product & _MASK
            columns[i + j + 1] += product >> _DIGIT
    for i in range(5):
        columns[i + 1] += columns[i] >> _DIGIT
        columns[i] &= _MASK
    return Mass(columns[3] + (columns[4] << _DIGIT), columns[2])


def pick(weights: jax.Array, mass: Mass, rank: Mass) -> jax.Array:
    """i32[R]: the first id, in vocabulary order, up to and with which the mass exceeds `rank`.

    `weights` u32[R, groups, DEPTH, LANES], `mass` [R, groups] its group_mass.  The last place when
    the whole mass does not exceed `rank`.
    """
    group, rank = _descend(mass, rank)
    chosen = jnp.take_along_axis(weights, each(group), axis=1)[:, 0]
    depth, rank = _descend(total(chosen), rank)
    lanes = jnp.take_along_axis(chosen, depth[:, None, None], axis=1)[:, 0]
    lane, _ = _descend(single(lanes), rank)
    return (group * DEPTH + depth) * LANES + lane


def _descend(mass: Mass, rank: Mass) -> tuple[jax.Array, Mass]:
    """The first entry of Mass [R, n] at which the running mass exceeds `rank` [R] (i32[R]; the last
    one if none does), and the rank inside it."""
    last = mass.high.shape[1] - 1
    places = jnp.arange(last + 1)
    upto = places <= places[:, None]  # a cumulative sum compiles and runs slower for so few entries
    passed = add_up(Mass(*(jnp.where(upto, part[:, None, :], 0) for part in mass)))
    entry = at_most(passed, column(rank)).sum(axis=1, dtype=jnp.int32)
    entry = jnp.minimum(entry, last)

    def at_entry(sums: Mass) -> Mass:
        return Mass(*(jnp.take_along_axis(part, entry[:, None], axis=1)[:, 0] for part in sums))

    return entry, minus(rank, minus(at_entry(passed), at_entry(mass)))


def _carry(high: jax.Array, low: jax.Array) -> Mass:
    return Mass(high + (low >> _DIGIT), low & _MASK)
