"""What the models share: norm, linear map, gated MLP, and the loop over layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from model_zoo import int8
from model_zoo.partition import constrain, split

Weights = dict[str, Any]
LayerFunction = Callable[[jax.Array, Any, jax.Array, Weights], tuple[jax.Array, Any]]
"""(hidden f32[T, D], kv, index of the layer i32[], its weights) -> (hidden, kv)"""

_FEW_ROWS = 128  # at most so many are the right operand of a matmul on a CPU


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
    if _few(x, weight):
        return jax.lax.platform_dependent(x, weight, cpu=_by_columns, default=_by_rows)
    return _by_rows(x, weight)


def linear(x: jax.Array, w: Weights, name: str) -> jax.Array:
    """`matmul` with the weight of that name, plus its bias where there is one."""
    y, bias = matmul(x, w[name], w.get(f"{name}_scale")), w.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(jnp.float32)


def gated_mlp(
    x: jax.Array, w: Weights, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """down(activation(gate(x)) * up(x)) in float32 (arXiv 2002.05202); gate, up are one weight."""
    if _few(x, w["gate_up"]) and jax.sharding.get_abstract_mesh().empty:
        columns = functools.partial(_mlp_by_columns, activation=activation)
        rows = functools.partial(_mlp_by_rows, activation=activation)
        return jax.lax.platform_dependent(x, w, cpu=columns, default=rows)
    return _mlp_by_rows(x, w, activation)


def _mlp_by_rows(
    x: jax.Array, w: Weights, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    gate, up = split(linear(x, w, "gate_up"), "gate_up")
    gated = activation(gate) * up
    return linear(gated.astype(x.dtype), w, "down")


def _mlp_by_columns(
    x: jax.Array, w: Weights, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Nothing is transposed but the result."""
    gate, up = jnp.split(_add_bias(jnp.einsum("oi,ti->ot", w["gate_up"], x), w, "gate_up"), 2)
    y = _add_bias(jnp.einsum("oi,it->ot", w["down"], activation(gate) * up), w, "down")
    return jax.lax.optimization_barrier(y).T


def _few(x: jax.Array, weight: jax.Array) -> bool:
    """XLA's CPU back end copies the right operand of a matmul into the order that its inner loop
    reads, and reads the left one in place: with few rows, copying the weights takes longer than the
    arithmetic, so there they stand on the left (float32, two cores with AVX2; in bfloat16, which
    those cores lack, half of the sizes gain and half lose).
    """
    return 1 < len(x) <= _FEW_ROWS and weight.dtype == jnp.float32


def _by_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32)


def _by_columns(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The barrier keeps XLA from turning the matmul round again."""
    return jax.lax.optimization_barrier(jnp.einsum("oi,ti->ot", weight, x)).T


def _add_bias(columns: jax.Array, w: Weights, name: str) -> jax.Array:
    bias = w.get(f"{name}_bias")
    return columns if bias is None else columns + bias.astype(jnp.float32)[:, None]


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
