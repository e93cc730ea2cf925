"""What the models share: norm, linear map, gated MLP, and the loop over layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from model_zoo import int8
from model_zoo.partition import constrain, split

Weights = dict[str, Any]
LayerFunction = Callable[[jax.Array, Any, jax.Array, Weights], tuple[jax.Array, Any]]
"""(hidden f32[T, D], kv, index of the layer i32[], its weights) -> (hidden, kv)"""


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """RMS norm over the last axis in float32 (arXiv 1910.07467), times offset + weight; dtype of
    the weight.
    """
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32)
    return (x * (factor + offset if offset else factor)).astype(weight.dtype)


def matmul(x: jax.Array, weight: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """x [T, in] times weight [out, in], float32; with a scale the weight is int8 (see `int8`).

    Checkpoints have weights this way, and so have the faster matmuls of few rows on a CPU.
    """
    if scale is not None:
        return int8.matmul(x, weight, scale)
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32)


def linear(x: jax.Array, w: Weights, name: str) -> jax.Array:
    """`matmul` with the weight of that name, plus its bias where there is one."""
    y, bias = matmul(x, w[name], w.get(f"{name}_scale")), w.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(jnp.float32)


def gated_mlp(
    x: jax.Array, w: Weights, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """down(activation(gate(x)) * up(x)) in float32 (arXiv 2002.05202); gate, up are one weight."""
    gate, up = split(linear(x, w, "gate_up"), "gate_up")
    gated = activation(gate) * up
    return linear(gated.astype(x.dtype), w, "down")


def run_layers(
    layer: LayerFunction,
    weights: Weights,  # stacked on a leading axis L
    hidden: jax.Array,
    kv: Any,
) -> tuple[jax.Array, Any]:
    """Runs `layer` over all layers.

    One scan with the KV as carry: as xs and ys the KV would be held twice.
    """

    def body(carry, w):
        hidden, kv, index = carry
        hidden, kv = layer(hidden, kv, index, w)
        hidden = constrain(hidden, "tokens", "embed")
        return (hidden, kv, index + 1), None

    carry = (constrain(hidden, "tokens", "embed"), kv, jnp.zeros((), jnp.int32))
    (hidden, kv, _), _ = jax.lax.scan(body, carry, weights)
    return hidden, kv
