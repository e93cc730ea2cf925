"""Linear maps and MLP of few and of many rows: one result, and weights that are not copied."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_zoo.layers import gated_mlp, matmul

RNG = np.random.default_rng(11)
ROWS = [1, 2, 7, 128, 129]
IN, HIDDEN = 48, 80


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(0, 1, shape).astype(np.float32)


def weights(bias: bool) -> dict[str, np.ndarray]:
    w = {"gate_up": normal(2 * HIDDEN, IN), "down": normal(IN, HIDDEN)}
    return w | {f"{k}_bias": 3 * normal(len(v)) for k, v in w.items()} if bias else w


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_matmul_is_that_of_float64(rows: int, dtype: str) -> None:
    x, weight = (jnp.asarray(a, dtype) for a in (normal(rows, IN), normal(96, IN)))
    found = jax.jit(matmul)(x, weight)
    assert found.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [jax.nn.silu, jnp.tanh])
def test_an_mlp_is_that_of_float64(rows: int, bias: bool, activation: Callable) -> None:
    x, w = normal(rows, IN), weights(bias)
    found = jax.jit(lambda x, w: gated_mlp(x, w, activation))(x, w)
    both = x.astype(np.float64) @ w["gate_up"].T + w.get("gate_up_bias", 0)
    gated = np.asarray(activation(both[:, :HIDDEN])) * both[:, HIDDEN:]
    expected = gated @ w["down"].T + w.get("down_bias", 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-3)


def test_a_row_is_its_own() -> None:
    x, w = normal(4, IN), weights(True)
    alone = gated_mlp(jnp.asarray(x), w)
    x[1], x[2] = np.nan, 0
    found = np.asarray(gated_mlp(jnp.asarray(x), w))
    np.testing.assert_array_equal(found[[0, 3]], np.asarray(alone)[[0, 3]])
    assert np.isnan(found[1]).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the order is a CPU's")
@pytest.mark.parametrize(("rows", "first"), [(1, False), (2, True), (128, True), (129, False)])
def test_on_a_cpu_the_weight_stands_on_the_left_of_few_rows(rows: int, first: bool) -> None:
    """XLA turns the matmul round again where nothing keeps it from that."""
    x, w = normal(rows, IN), weights(False)
    text = jax.jit(gated_mlp).lower(x, w).compile().as_text()
    text += jax.jit(matmul).lower(x, normal(96, IN)).compile().as_text()
    for out in (2 * HIDDEN, IN, 96):
        by_columns, by_rows = f"f32[{out},{rows}]", f"f32[{rows},{out}]"
        dots = [line.split(" dot(")[0] for line in text.splitlines() if " dot(" in line]
        assert any(by_columns in dot for dot in dots) == first
        assert any(by_rows in dot for dot in dots) != first
