"""Matrices as int8 with one float32 scale a row (an output channel), and matmuls with them.

Only weights lose precision.  A few rows are multiplied in integers: each value of x is written as
two int8 digits, the second 1/254 of the first, so that x keeps 16 bits.  The weights are then read
once, as int8, whatever the digits.  For more rows the digits would cost twice the arithmetic;
there the weights are converted first, which many rows pay for.
"""

import jax
import jax.numpy as jnp

_STEPS = 127  # from 0 to the largest int8 on either side
_FINER = 2 * _STEPS  # steps of the second digit in one of the first
FEW_ROWS = 64  # at most so many are multiplied in integers


def quantize(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., out, in] -> int8 of that shape, and scales f32[..., out]: weight ~ int8 * scale.

    No value is off by more than half a scale; a row of zeros has scale 0.
    """
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=-1) / _STEPS
    steps = weight / jnp.where(scale == 0, 1, scale)[..., None]
    return jnp.round(steps).astype(jnp.int8), scale


def matmul(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """x [T, in] times the matrix [out, in] that `weight` and `scale` stand for: f32[T, out]."""
    if len(x) > FEW_ROWS:
        y = jnp.einsum("ti,oi->to", x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
        return y * scale
    x = x.astype(jnp.float32)
    step = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _STEPS
    steps = x / jnp.where(step == 0, 1, step)
    first = jnp.round(steps)
    second = jnp.round((steps - first) * _FINER)
    digits = jnp.concatenate((first, second)).astype(jnp.int8)
    y = jnp.einsum("ti,oi->to", digits, weight, preferred_element_type=jnp.int32)
    y = y.astype(jnp.float32)
    return (y[: len(x)] + y[len(x) :] / _FINER) * step * scale
