"""One call a layer: the form a CPU runs by default, against the loop and the dense reference."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.runner.layer_calls import Chain, put_together, take_apart
from tests.equivalence.rig import BLOCK, GREEDY, SCORED, Rig, generate
from tests.reference import tiny

LENGTHS = (5 * BLOCK + 3, 1, BLOCK, 2 * BLOCK + 1)


@pytest.mark.parametrize("name", ["gqa_9_3", "mistral", "rope_yarn"])
def test_calls_equal_the_dense_reference(make_rig: Callable[..., Rig], name: str) -> None:
    """Chunks, decodes beside them, and a cache hit."""
    rig = make_rig(name, budgets=(16,), layers="calls")
    assert all(isinstance(p.compiled, Chain) for p in rig.runner.manifest if "bone" in p.spec.kind)
    prompts = [tiny.make_prompt(length, 7 + length) for length in LENGTHS]
    engine = rig.engine()
    rig.check(generate(engine, prompts, SCORED))
    rig.check(generate(engine, prompts, GREEDY))


def test_calls_and_loop_give_the_same_tokens(make_rig: Callable[..., Rig]) -> None:
    prompts = [tiny.make_prompt(length, 3 + length) for length in LENGTHS]
    both = [
        generate(make_rig("gqa_9_3", budgets=(16,), layers=layers).engine(), prompts, GREEDY)
        for layers in ("loop", "calls")
    ]
    assert [a.tokens for a in both[0]] == [a.tokens for a in both[1]]


def _state() -> nnx.State:
    """Two parameters of two layers each, and one that no layer owns."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.Module()
            self.layers.up = nnx.Param(jnp.arange(12.0).reshape(2, 3, 2))
            self.layers.norm = nnx.Param(jnp.arange(2.0).reshape(2, 1))
            self.embed = nnx.Param(jnp.ones((4, 2)))

    return nnx.split(Model())[1]


def test_every_layer_gets_its_own_weights() -> None:
    taken = take_apart(_state())
    assert len(taken.layers) == 2 and set(taken.layers[0]) == {"up", "norm"}
    np.testing.assert_array_equal(taken.layers[1]["up"], np.arange(12.0).reshape(2, 3, 2)[1])
    np.testing.assert_array_equal(taken.layers[0]["norm"], [0.0])
    assert "layers" not in taken.shared and "embed" in taken.shared


def test_a_state_put_together_has_every_parameter() -> None:
    abstract = jax.eval_shape(_state)
    whole = put_together(take_apart(_state()).shared, abstract)
    assert [path for path, _ in nnx.to_flat_state(whole)] == [
        path for path, _ in nnx.to_flat_state(abstract)
    ]
