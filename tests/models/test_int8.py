"""Int8 weights: what rounding may cost, and that activations lose nothing by it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_zoo import int8
from model_zoo.int8 import FEW_ROWS, matmul, quantize
from model_zoo.weights import load_module, open_checkpoint
from tests.families.cases import case
from tests.models import weight_files as files

RNG = np.random.default_rng(5)


def with_outliers(*shape: int) -> np.ndarray:
    """Common values, and one in fifty that is thirty times as large."""
    return RNG.normal(0, 1, shape) * np.where(RNG.random(shape) < 0.02, 30, 1)


def test_no_weight_is_off_by_more_than_half_a_step() -> None:
    weight = with_outliers(3, 40, 64).astype(np.float32)
    weight[1, 7] = 0
    steps, scale = (np.asarray(part) for part in quantize(jnp.asarray(weight)))
    assert steps.dtype == np.int8 and scale.dtype == np.float32 and scale.shape == (3, 40)
    assert np.abs(steps).max() == 127 and scale[1, 7] == 0
    assert (np.abs(steps * scale[..., None] - weight) <= 0.5001 * scale[..., None]).all()


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, FEW_ROWS + 1])
def test_activations_lose_nothing_that_counts(rows: int) -> None:
    """Against float64 with the very weights: the way of few rows and that of many."""
    steps, scale = quantize(jnp.asarray(with_outliers(96, 300), jnp.float32))
    x = with_outliers(rows, 300).astype(np.float32)
    x[-1] *= 1e-6
    found = np.asarray(matmul(jnp.asarray(x), steps, scale))
    expected = x.astype(np.float64) @ (np.asarray(steps) * np.asarray(scale)[:, None]).T
    worst = np.abs(found - expected).max(axis=1) / np.sqrt(np.mean(expected**2, axis=1))
    assert worst.max() < 2e-3  # one digit alone: 0.1


def test_a_row_s_result_depends_on_no_neighbour() -> None:
    steps, scale = quantize(jnp.asarray(with_outliers(8, 16), jnp.float32))
    x = with_outliers(4, 16).astype(np.float32)
    alone = np.asarray(matmul(jnp.asarray(x[:1]), steps, scale))
    x[1], x[2], x[3] = np.nan, 0, 1e30
    found = np.asarray(matmul(jnp.asarray(x), steps, scale))
    np.testing.assert_array_equal(found[:1], alone)
    assert np.isnan(found[1]).all() and (found[2] == 0).all()


@pytest.mark.parametrize(("name", "count"), [("qwen2", 5), ("llama", 6), ("mixtral", 6)])
def test_every_matrix_of_a_checkpoint_is_loaded_as_int8(name: str, count: int) -> None:
    """The llama here has a head of its own."""
    folder = case(name).folder
    whole = files.params(load_module(open_checkpoint(folder), "bfloat16"))
    exact = files.params(load_module(open_checkpoint(folder), "float32"))
    found = files.params(load_module(open_checkpoint(folder), "bfloat16", int8=True))
    scales = {path for path in found if path.endswith("_scale")}
    assert set(found) - scales == set(whole)
    assert len(scales) == count
    for path, value in whole.items():
        if f"{path}_scale" in scales:
            steps, scale = int8.quantize(jnp.asarray(exact[path]))  # of float32, not of bfloat16
            np.testing.assert_array_equal(found[path], steps)
            np.testing.assert_array_equal(found[f"{path}_scale"], scale)
        else:
            assert any(kind in path for kind in ("norm", "bias", "router"))
            np.testing.assert_array_equal(found[path], value)


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_a_random_int8_model_is_whole(name: str) -> None:
    config = load_module(open_checkpoint(case(name).folder), "float32").config
    made = type(load_module(open_checkpoint(case(name).folder), "float32"))
    module = made(dataclasses.replace(config, int8=True), nnx.Rngs(0))
    abstract = nnx.eval_shape(lambda: made(dataclasses.replace(config, int8=True), nnx.Rngs(0)))
    sizes = [
        {path: (leaf.get_value().shape, leaf.get_value().dtype) for path, leaf in flat}
        for flat in (nnx.to_flat_state(nnx.state(m)) for m in (module, abstract))
    ]
    assert sizes[0] == sizes[1]
    assert np.abs(np.asarray(module.layers.down[...])).max() == 127
