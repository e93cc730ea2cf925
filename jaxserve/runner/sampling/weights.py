"""Probabilities as integers.

A token's weight is its probability relative to the most likely token, in units of 2^-26.  Sums of
integers are the same in every order, so masses, and with them the drawn token, depend neither on
the number of rows nor on how the compiler arranges a reduction, and two ways to the same sum agree
to the last bit. A mass goes beyond 32 bits: it is held as two uint32, `high * 2^16 + low`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.runner.sampling.blocks import BLOCK

ONE = 2**26 - 1  # weight of the most likely token: BLOCK of them just fit in a uint32
_DIGIT = 16
_MASK = 2**_DIGIT - 1


class Mass(NamedTuple):
    """Sum of weights, `high * 2^16 + low`, low < 2^16; exact for up to 2^18 tokens and more."""

    high: jax.Array  # u32
    low: jax.Array  # u32


def weigh(values: jax.Array, peak: jax.Array, temperature: jax.Array) -> jax.Array:
    """u32 weights of `values` (broadcast against the row's `peak` and `temperature`); 0 for
    -inf.
    """
    scaled = jnp.exp((values - peak) / temperature) * 2.0**26
    return jnp.minimum((scaled + 0.5).astype(jnp.int32), ONE).astype(jnp.uint32)


def block_sums(weights: jax.Array) -> jax.Array:
    """u32[R, blocks] of weights u32[R, blocks, BLOCK]."""
    return weights.sum(axis=2, dtype=jnp.uint32)


def total(sums: jax.Array) -> Mass:
    """Mass [...] of u32[..., n]."""
    high = (sums >> _DIGIT).sum(axis=-1, dtype=jnp.uint32)
    return _carry(high, (sums & _MASK).sum(axis=-1, dtype=jnp.uint32))


def running(sums: jax.Array) -> Mass:
    """Mass [..., n] up to and with each entry of u32[..., n]."""
    high = jnp.cumsum(sums >> _DIGIT, axis=-1, dtype=jnp.uint32)
    return _carry(high, jnp.cumsum(sums & _MASK, axis=-1, dtype=jnp.uint32))


def at_most(a: Mass, b: Mass) -> jax.Array:
    """bool: a <= b."""
    return (a.high < b.high) | ((a.high == b.high) & (a.low <= b.low))


def less(a: Mass, b: Mass) -> jax.Array:
    """bool: a < b."""
    return ~at_most(b, a)


def minus(a: Mass, b: Mass) -> Mass:
    """a - b, for b <= a."""
    borrow = (a.low < b.low).astype(jnp.uint32)
    return Mass(a.high - b.high - borrow, (a.low - b.low) & _MASK)


def column(mass: Mass) -> Mass:
    """[R, 1] of [R]."""
    return Mass(mass.high[:, None], mass.low[:, None])


def choose(condition: jax.Array, a: Mass, b: Mass) -> Mass:
    """Per row, `a` where `condition`, else `b`."""
    return Mass(jnp.where(condition, a.high, b.high), jnp.where(condition, a.low, b.low))


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


def pick(sums: jax.Array, inside: Callable[[jax.Array], jax.Array], rank: Mass) -> jax.Array:
    """i32[R]: the first id, in vocabulary order, up to and with which the mass exceeds `rank`.

    `sums` u32[R, blocks] are the block sums of the weights, `inside` gives the weights u32[R,
    BLOCK] of one block a row.  The last id when the whole mass does not exceed `rank`.
    """
    passed = running(sums)
    last = sums.shape[1] - 1
    block = jnp.minimum(at_most(passed, column(rank)).sum(axis=1, dtype=jnp.int32), last)
    index = block[:, None]
    before = minus(
        Mass(*(jnp.take_along_axis(part, index, axis=1)[:, 0] for part in passed)),
        _carry(*_split(jnp.take_along_axis(sums, index, axis=1)[:, 0])),
    )
    rest = minus(rank, before)
    saturated = rest.high > _MASK
    rest_in_block = jnp.where(saturated, jnp.uint32(2**32 - 1), (rest.high << _DIGIT) + rest.low)
    inner = jnp.cumsum(inside(block), axis=-1, dtype=jnp.uint32)
    place = (inner <= rest_in_block[:, None]).sum(axis=1, dtype=jnp.int32)
    return block * BLOCK + jnp.minimum(place, BLOCK - 1)


def _split(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value >> _DIGIT, value & _MASK


def _carry(high: jax.Array, low: jax.Array) -> Mass:
    return Mass(high + (low >> _DIGIT), low & _MASK)
