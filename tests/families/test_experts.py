"""Mixtures of experts: padding goes nowhere, neighbours do not matter, both matmuls agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_zoo import int8
from model_zoo.decoder_config import Moe
from model_zoo.experts import by_tiles, moe_mlp, ragged, route

D, F, EXPERTS, TOP = 12, 10, 5, 2
MOE = Moe(EXPERTS, TOP, normalise=True)
RNG = np.random.default_rng(0)
WEIGHTS = {
    "router": RNG.standard_normal((EXPERTS, D)).astype(np.float32),
    "gate_up": RNG.standard_normal((EXPERTS, 2 * F, D)).astype(np.float32),
    "down": RNG.standard_normal((EXPERTS, D, F)).astype(np.float32),
}
W = {name: jnp.asarray(array) for name, array in WEIGHTS.items()}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def one_token(x: np.ndarray, *, normalise: bool = True) -> np.ndarray:
    """The definition, one token at a time, in float64."""
    scores = np.exp(WEIGHTS["router"].astype(float) @ x)
    scores /= scores.sum()
    best = np.argsort(-scores)[:TOP]
    out = np.zeros(D)
    for expert in best:
        gate, up = np.split(WEIGHTS["gate_up"][expert].astype(float) @ x, 2)
        share = scores[expert] / (scores[best].sum() if normalise else 1.0)
        out += share * (WEIGHTS["down"][expert].astype(float) @ (silu(gate) * up))
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_equals_the_definition_and_padding_goes_nowhere(tokens: int, normalise: bool) -> None:
    """Padding is NaN: it may reach neither an expert's tokens nor the output."""
    x = RNG.standard_normal((tokens + 3, D)).astype(np.float32)
    x[tokens:] = np.nan
    real = jnp.arange(len(x)) < tokens
    out = np.asarray(moe_mlp(jnp.asarray(x), real, W, Moe(EXPERTS, TOP, normalise), jax.nn.silu))
    expected = [one_token(row.astype(float), normalise=normalise) for row in x[:tokens]]
    np.testing.assert_allclose(out[:tokens], expected, rtol=0, atol=2e-4)
    assert (out[tokens:] == 0).all()


def test_neighbours_change_no_bit() -> None:
    x = RNG.standard_normal((40, D)).astype(np.float32)
    every = jnp.ones(40, bool)
    whole = np.asarray(moe_mlp(jnp.asarray(x), every, W, MOE, jax.nn.silu))
    other = x.copy()
    other[1:] = RNG.standard_normal((39, D))
    alone = np.asarray(moe_mlp(jnp.asarray(other), jnp.arange(40) < 1, W, MOE, jax.nn.silu))
    np.testing.assert_array_equal(alone[0], whole[0])


# rows of each expert
SIZES = [(3, 0, 40, 1, 0), (9, 0, 1, 0, 0), (0, 0, 0, 0, 0), (0, 0, 0, 0, 70), (33,) * 5]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("product", [by_tiles, ragged])
def test_grouped_matmuls_equal_the_definition(product, sizes: tuple[int, ...]) -> None:
    total = sum(sizes)
    x = RNG.standard_normal((total + 6, D)).astype(np.float32)
    x[total:] = 1e30  # rows of no group
    found = np.asarray(product(jnp.asarray(x), W["gate_up"], jnp.array(sizes, jnp.int32)))
    group = np.repeat(np.arange(5), sizes)
    expected = np.einsum("ti,toi->to", x[:total], WEIGHTS["gate_up"][group])
    np.testing.assert_allclose(found[:total], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("product", [by_tiles, ragged])
def test_grouped_matmuls_of_int8_equal_the_definition(product, sizes: tuple[int, ...]) -> None:
    """Experts of very different sizes, so that one's scales do not do for another."""
    weight = WEIGHTS["down"] * np.logspace(-2, 2, 5)[:, None, None]
    steps, scale = int8.quantize(jnp.asarray(weight))
    total = sum(sizes)
    x = RNG.standard_normal((total + 6, F)).astype(np.float32)
    x[total:] = 1e30  # rows of no group
    found = np.asarray(product(jnp.asarray(x), steps, jnp.array(sizes, jnp.int32), scale))
    group = np.repeat(np.arange(5), sizes)
    rounded = np.asarray(steps) * np.asarray(scale)[..., None]
    expected = np.einsum("ti,toi->to", x[:total], rounded[group])
    size = np.abs(rounded).max(axis=(1, 2))[group][:, None]
    assert (np.abs(found[:total] - expected) <= 2e-3 * size).all()


def test_weights_of_the_chosen_add_up_to_one_when_asked() -> None:
    x = jnp.asarray(RNG.standard_normal((9, D)), jnp.float32)
    weights, chosen = route(x, W["router"], MOE)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    assert all(len(set(row)) == TOP for row in chosen.tolist())
    assert (route(x, W["router"], Moe(EXPERTS, TOP, normalise=False))[0].sum(axis=1) < 1).all()
