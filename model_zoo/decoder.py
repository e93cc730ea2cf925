"""The decoder that all families share; `DecoderConfig` says in what they differ."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_zoo import int8, rope
from model_zoo.decoder_config import DecoderConfig
from model_zoo.experts import moe_mlp
from model_zoo.layers import (
    LayerFunction,
    Weights,
    gated_mlp,
    linear,
    matmul,
    rms_norm,
    run_layers,
)
from model_zoo.parameters import axes, joined, matrices, shapes
from model_zoo.partition import Kernels, kv_write, ragged_paged_attention, split
from model_zoo.step_inputs import StepInputs

_NO_WINDOW = 2**30  # of a full layer beside layers with a window: more than any context
Turns = list[tuple[jax.Array, jax.Array]]  # cos and sin f32[T, pairs], one a rope
_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


class Layers(nnx.Module):
    """The weights of all layers, stacked on a leading axis."""


class Decoder(nnx.Module):
    """Weights, matmul operands and KV have `config.dtype`, all else is float32; with `config.int8`
    matrices are int8 (see `int8`).

    With bfloat16 the float32 residual stream costs no time that can be measured and halves the
    divergence from the float32 model (SmolLM2: mean KL 0.00023 against 0.00049 nats a token).
    Every parameter has its logical axes in its metadata, as `axes` (see `parameters`).
    """

    embed: nnx.Param
    embed_scale: nnx.Param  # where matrices are int8
    head: nnx.Param  # where it is not the embedding
    norm: nnx.Param

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.layers = Layers()
        names = axes(config)
        for path, value in _start(config, rngs).items():
            owner, name = (self.layers, path[7:]) if path.startswith("layers.") else (self, path)
            setattr(owner, name, nnx.Param(value, axes=names[path]))

    def forward(
        self, kv: Any, x: StepInputs, *, block_size: int, kernels: Kernels = "xla"
    ) -> tuple[jax.Array, Any]:
        """Hidden states f32[T, D] of the step's tokens before the last norm, and the KV with them.

        `x.tokens` are the real ids: seats are already resolved.  `kernels`: of attention and the KV
        write, "auto" those of the platform that is compiled for.
        """
        layer, own = self._layer(x, self.turns(x.positions), block_size, kernels)
        return run_layers(layer, own, self.embed_tokens(x.tokens), kv)

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """What the first layer is given: f32[T, D]."""
        c = self.config
        hidden = self.embed[...][tokens].astype(jnp.float32)
        if c.int8:
            hidden = hidden * self.embed_scale[...][tokens][:, None]
        if c.embed_scale != 1.0:  # rounded to the dtype, as the models were trained
            hidden = hidden * jnp.asarray(c.embed_scale, c.dtype).astype(jnp.float32)
        return hidden

    def turns(self, positions: jax.Array) -> Turns:
        """How positions i32[T] rotate queries and keys; the same in all layers."""
        return [rope.angles(one, positions) for one in self.config.ropes]

    def one_layer(  # noqa: PLR0913  a layer's weights, and what all layers have
        self,
        hidden: jax.Array,
        kv: Any,
        index: jax.Array,
        w: Weights,
        x: StepInputs,
        turns: Turns,
        *,
        block_size: int,
        kernels: Kernels = "xla",
    ) -> tuple[jax.Array, Any]:
        """Layer `index` of `forward` with the weights `w`; the module's own are not used."""
        layer, own = self._layer(x, turns, block_size, kernels)
        rest = {name: jnp.asarray(own[name])[index] for name in own.keys() - w.keys()}
        return layer(hidden, kv, index, rest | w)

    def _layer(
        self, x: StepInputs, turns: Turns, block_size: int, kernels: Kernels
    ) -> tuple[LayerFunction, Weights]:
        """What a layer does, and what each layer has of its own, stacked."""
        c = self.config
        real = jnp.arange(len(x.tokens)) < x.query_starts[-1]
        own, fixed = self._by_layer(turns)
        if x.block_tables.ndim == 3:  # a table for each group of layers
            layout = c.kv_layout
            own["kv_group"] = np.array(layout.groups, np.int32)
            own["kv_place"] = np.array(layout.places, np.int32)

        def layer(
            hidden: jax.Array, kv: Any, index: jax.Array, w: Weights
        ) -> tuple[jax.Array, Any]:
            w = fixed | w
            q, k, v = self._qkv(self._before(hidden, w, "norm1"), w)
            place, slots, tables = index, x.slots, x.block_tables
            if "kv_group" in w:
                place, group = w["kv_place"], w["kv_group"]
                slots, tables = slots[group], tables[group]
            kv = kv_write(kv, place, slots, k, v, kernels)
            mixed = ragged_paged_attention(
                q,
                kv,
                place,
                tables,
                x.query_starts,
                x.kv_lens,
                x.num_decodes,
                block_size=block_size,
                window=w["window"],
                soft_cap=c.attention_cap,
                scale=c.attention_scale,
                implementation=kernels,
            )
            mixed = linear(mixed.reshape(-1, c.N * c.H), w, "out")
            hidden = self._add(hidden, mixed, w, "post1")
            mixed = self._mlp(self._before(hidden, w, "norm2"), real, w)
            return self._add(hidden, mixed, w, "post2"), kv

        return layer, own

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[R, V] of hidden states [R, D]: last norm and head."""
        c = self.config
        hidden = rms_norm(hidden, self.norm[...], c.eps, c.norm_offset)
        head, scale = (self.embed, "embed_scale") if c.tie else (self.head, "head_scale")
        logits = matmul(hidden, head[...], getattr(self, scale)[...] if c.int8 else None)
        if c.logit_scale != 1.0:
            logits = logits * c.logit_scale
        return logits if c.logit_cap is None else c.logit_cap * jnp.tanh(logits / c.logit_cap)

    def _by_layer(self, turns: Turns) -> tuple[Weights, Weights]:
        """What each layer has of its own, stacked, and what all have in common: weights, window,
        rope."""
        c = self.config
        weights = nnx.to_pure_dict(nnx.state(self.layers))
        fixed: Weights = {"window": c.windows[0] if c.windows else None}
        if len(set(c.windows)) > 1:
            widths = [_NO_WINDOW if window is None else window for window in c.windows]
            weights["window"] = np.array(widths, np.int32)
            del fixed["window"]
        if len(turns) == 1:
            fixed["turns"] = turns[0]
        else:
            cos, sin = (jnp.stack(part) for part in zip(*turns, strict=True))
            weights["rope"] = np.array(c.layer_ropes, np.int32)
            fixed["ropes"] = (cos, sin)
        return weights, fixed

    def _qkv(self, x: jax.Array, w: Weights) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated q [T, N, H] and k [T, K, H], and v [T, K, H]."""
        c = self.config
        qkv = linear(x, w, "qkv")
        q, k, v = split(qkv, "qkv", joined(c)["qkv"])
        if c.qk_norm == "all":
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        q, k, v = (part.reshape(len(part), -1, c.H) for part in (q, k, v.astype(c.dtype)))
        if c.qk_norm == "head":
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        cos, sin = w["turns"] if "turns" in w else (part[w["rope"]] for part in w["ropes"])
        q, k = (rope.rotate(part.astype(c.dtype), cos, sin) for part in (q, k))
        return q, k, v

    def _mlp(self, x: jax.Array, real: jax.Array, w: Weights) -> jax.Array:
        activation = _ACTIVATIONS[self.config.activation]
        if self.config.moe:
            return moe_mlp(x, real, w, self.config.moe, activation)
        return gated_mlp(x, w, activation)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self.config.eps, self.config.norm_offset)

    def _before(self, hidden: jax.Array, w: Weights, name: str) -> jax.Array:
        """What attention or MLP works on, in the dtype of the weights."""
        return self._norm(hidden, w[name]) if name in w else hidden.astype(self.config.dtype)

    def _add(self, hidden: jax.Array, new: jax.Array, w: Weights, name: str) -> jax.Array:
        """The residual stream f32[T, D] with what attention or MLP gave."""
        c = self.config
        if name in w:
            new = rms_norm(new, w[name].astype(jnp.float32), c.eps, c.norm_offset)
        return hidden + (new if c.residual_scale == 1.0 else new * c.residual_scale)


def _start(c: DecoderConfig, rngs: nnx.Rngs) -> dict[str, jax.Array]:
    """A random model."""
    values: dict[str, jax.Array] = {}
    for path, shape in shapes(c).items():
        if path in matrices(c):
            values[path], values[f"{path}_scale"] = int8.quantize(_random(c, path, shape, rngs))
        elif path not in values:
            values[path] = _random(c, path, shape, rngs).astype(c.dtype)
    return values


def _random(c: DecoderConfig, path: str, shape: tuple[int, ...], rngs: nnx.Rngs) -> jax.Array:
    """Start values of a random model, float32."""
    name = path.rpartition(".")[2]
    if name.endswith(("norm", "norm1", "norm2")) or name.startswith("post"):
        return jnp.full(shape, 1.0 - c.norm_offset, jnp.float32)
    scale = {"embed": 0.5}.get(name, 0.02 if name.endswith("bias") else shape[-1] ** -0.5)
    return rngs.params.normal(shape) * scale
