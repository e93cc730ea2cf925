"""Mixtures of experts: top-k routing, and one grouped matmul over tokens sorted by expert."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from model_zoo.decoder_config import Moe
from model_zoo.layers import Weights, matmul
from model_zoo.partition import split

_TILES = (4, 32)  # fewest and most rows of one expert that share one matmul on a CPU
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(  # rows [m, in] by their group's [out, in]
    dot_dimension_numbers=(([1], [2]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def route(x: jax.Array, router: jax.Array, moe: Moe) -> tuple[jax.Array, jax.Array]:
    """Weights f32[T, k] and numbers i32[T, k] of the experts of each token of x [T, D].

    Softmax over all experts, then the best k (Switch and GShard order, arXiv 2101.03961).
    """
    weights, chosen = jax.lax.top_k(jax.nn.softmax(matmul(x, router), axis=-1), moe.top_k)
    if moe.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def moe_mlp(
    x: jax.Array,  # [T, D]
    real: jax.Array,  # bool[T]  False for padding, which goes to no expert and comes out zero
    w: Weights,
    moe: Moe,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:  # f32[T, D]
    """The weighted sum of each token's experts, each a gated MLP.

    A token's result does not depend on its neighbours: its experts are added in their own order.
    """
    x = jnp.where(real[:, None], x, 0)
    weights, chosen = route(x, w["router"], moe)
    group = jnp.where(real[:, None], chosen, moe.experts).reshape(-1)  # padding sorts to the end
    order = jnp.argsort(group)
    sizes = jnp.bincount(group, length=moe.experts).astype(jnp.int32)  # drops the padding
    rows = x[order // moe.top_k]
    gate, up = split(grouped_matmul(rows, w, "gate_up", sizes), "gate_up")
    gated = (activation(gate) * up).astype(x.dtype)
    out = grouped_matmul(gated, w, "down", sizes)
    out = jnp.where((jnp.arange(len(order)) < jnp.sum(sizes))[:, None], out, 0)
    by_token = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(by_token * weights[..., None], axis=1)


def grouped_matmul(x: jax.Array, w: Weights, name: str, sizes: jax.Array) -> jax.Array:
    """Rows x [m, in], the first sizes[0] of group 0 and so on, times the weight of that name
    [groups, out, in].

    f32[m, out]; rows past the last group may hold anything.  XLA's ragged dot, but on a CPU, where
    it multiplies every row with every group and reads the weights of all.
    """
    scale = w.get(f"{name}_scale")
    scales = () if scale is None else (scale,)
    return jax.lax.platform_dependent(x, w[name], sizes, *scales, cpu=by_tiles, default=ragged)


def ragged(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
    """`grouped_matmul` by XLA; with scales [groups, out] the weight is int8, converted first."""
    y = jax.lax.ragged_dot_general(
        x, weight.astype(x.dtype), sizes, _BY_GROUP, preferred_element_type=jnp.float32
    )
    if scale is None:
        return y
    return y * jnp.repeat(scale, sizes, axis=0, total_repeat_length=len(x))


def by_tiles(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
    """`grouped_matmul` as a loop over tiles of rows of one group: groups without rows cost
    nothing, and a tile is about what a group gets.  With scales a tile is few rows, and multiplied
    in integers (see `int8`).
    """
    size = min(len(x), _tile(len(x) // len(weight)))
    tiles = -(-sizes // size)
    ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(tiles)
    rows = jnp.pad(x, ((0, size), (0, 0)))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.sum(tile_ends <= index)
        before = index - tile_ends[group] + tiles[group]  # tiles of the group before this one
        start = ends[group] - sizes[group] + before * size
        tile = jax.lax.dynamic_slice_in_dim(rows, start, size)
        result = matmul(tile, weight[group], None if scale is None else scale[group])
        old = jax.lax.dynamic_slice_in_dim(out, start, size)  # what lies past the group's end
        inside = (start + jnp.arange(size) < ends[group])[:, None]
        result = jnp.where(inside, result, old)
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    out = jnp.zeros((len(x) + size, weight.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, tile_ends[-1], one_tile, out)[: len(x)]


def _tile(rows_each: int) -> int:
    """A power of two: few sizes to know the speed of."""
    fewest, most = _TILES
    return min(most, max(fewest, 1 << max(0, rows_each - 1).bit_length()))
