"""The backbone as a chain of programs, one call a layer: the faster form on a CPU.

Inside a loop over stacked weights XLA's CPU back end copies every weight before its matmul; arrays
of their own are read in place (SmolLM2: a step of 8 tokens a fifth shorter), and one layer compiles
in half the time of a loop.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

LAYERS = "layers"  # the name of the stacked weights in a module of the zoo


class ByLayer(NamedTuple):
    """A model's weights, taken apart."""

    shared: Any  # a state of nnx: what no layer owns
    layers: tuple[dict[str, Any], ...]  # weights of each layer


def take_apart(weights: Any) -> ByLayer:
    """`weights`: a state of nnx, of arrays or abstract.

    The stacked arrays are taken out of it one by one, so that memory never holds two copies of all.
    """
    shared = nnx.State({name: part for name, part in weights.items() if name != LAYERS})
    stacked = weights[LAYERS]
    layers: list[dict[str, Any]] = []
    for name in list(stacked):
        parts = _unstack(stacked.pop(name).get_value())
        layers = layers or [{} for _ in parts]
        for layer, part in zip(layers, parts, strict=True):
            layer[name] = part
    return ByLayer(shared, tuple(layers))


def put_together(shared: Any, abstract: Any) -> Any:
    """A whole state again, with abstract arrays for the layers' weights."""
    return nnx.State({**shared, LAYERS: abstract[LAYERS]})


class Chain:
    """backbone[T]: embed[T], layer[T] for every layer, keep[T]; called as the single program is."""

    def __init__(self, num_layers: int, embed: Any, layer: Any, keep: Any) -> None:
        self._embed, self._layer, self._keep = embed, layer, keep
        self._numbers = jax.device_put([np.int32(number) for number in range(num_layers)])

    def __call__(
        self, weights: ByLayer, kv: Any, hidden: Any, last_tokens: Any, packed: Any
    ) -> tuple[Any, Any, Any]:
        packed = jax.device_put(packed)
        x, turns = self._embed(weights.shared, last_tokens, packed)
        for number, own in zip(self._numbers, weights.layers, strict=True):
            x, kv = self._layer(own, x, kv, number, packed, turns)
        hidden, mark = self._keep(hidden, x, packed)
        return kv, hidden, mark

    def memory_analysis(self) -> Any:
        """Of the layer, which needs the most."""
        return self._layer.memory_analysis()


def _unstack(stacked: Any) -> list[Any]:
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)] * stacked.shape[0]
    return [jax.block_until_ready(stacked[number]) for number in range(stacked.shape[0])]
