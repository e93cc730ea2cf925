"""Llama-architecture decoders: Llama 2 and 3, SmolLM2, TinyLlama, Mistral without a window."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model_zoo import rope
from model_zoo.checkpoint import Place
from model_zoo.layers import Weights, gated_mlp, linear, rms_norm, run_layers
from model_zoo.partition import kv_write, ragged_paged_attention, split
from model_zoo.step_inputs import StepInputs


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes by their glossary letter, and the options of the family."""

    L: int
    D: int
    F: int
    N: int
    K: int
    H: int
    V: int
    rope: rope.Rope
    eps: float = 1e-5
    tie: bool = False  # the head is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position: int = 2048  # tokens the model was trained for
    longest: int = 2048  # tokens it can be served for when the config asks; see `rope.longest`
    dtype: str = "float32"

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], *, dtype: str = "float32", max_len: int = 0
    ) -> "LlamaConfig":
        """Reads a Hugging Face config.json; ValueError names whatever is not supported.

        `max_len` is the longest request that will be served (see `rope.from_hf`); 0: what the model
        was trained for.
        """
        _refuse_unknown(hf)
        heads, width = hf["num_attention_heads"], hf["hidden_size"]
        head_dim = hf.get("head_dim") or width // heads
        return cls(
            L=hf["num_hidden_layers"],
            D=width,
            F=hf["intermediate_size"],
            N=heads,
            K=hf.get("num_key_value_heads") or heads,
            H=head_dim,
            V=hf["vocab_size"],
            rope=rope.from_hf(hf, head_dim=head_dim, max_len=max_len),
            eps=hf.get("rms_norm_eps", 1e-6),
            tie=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=bool(hf.get("attention_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
            max_position=hf.get("max_position_embeddings", 2048),
            longest=rope.longest(hf),
            dtype=dtype,
        )


def _refuse_unknown(hf: Mapping[str, Any]) -> None:
    missing = [name for name in _REQUIRED if not isinstance(hf.get(name), int)]
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} must be whole numbers")
    for name, allowed in _ALLOWED.items():
        value = hf.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"config.json: {name}={value!r} is not supported by llama; supported: {allowed}"
            )
    heads, kv_heads = (
        hf["num_attention_heads"],
        hf.get("num_key_value_heads") or hf["num_attention_heads"],
    )
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={kv_heads}"
        )


_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
}


class Layers(nnx.Module):
    """The weights of all layers, stacked on a leading axis; matrices are [L, out, in]."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        sizes = {"embed": c.D, "heads": c.N * c.H, "mlp": c.F}
        sizes |= {"qkv": (c.N + 2 * c.K) * c.H, "gate_up": 2 * c.F}

        def normal(*axes: str) -> nnx.Param:
            shape = (c.L, *(sizes[axis] for axis in axes))
            values = rngs.params.normal(shape) * shape[-1] ** -0.5
            return nnx.Param(values.astype(c.dtype), axes=("layers", *axes))

        def bias(axis: str) -> nnx.Param:
            values = rngs.params.normal((c.L, sizes[axis])) * 0.02
            return nnx.Param(values.astype(c.dtype), axes=("layers", axis))

        self.norm1 = nnx.Param(jnp.ones((c.L, c.D), c.dtype), axes=("layers", "embed"))
        self.norm2 = nnx.Param(jnp.ones((c.L, c.D), c.dtype), axes=("layers", "embed"))
        self.qkv = normal("qkv", "embed")
        self.out = normal("embed", "heads")
        self.gate_up = normal("gate_up", "embed")
        self.down = normal("embed", "mlp")
        if c.attention_bias:
            self.qkv_bias, self.out_bias = bias("qkv"), bias("embed")
        if c.mlp_bias:
            self.gate_up_bias, self.down_bias = bias("gate_up"), bias("embed")


class Llama(nnx.Module):
    """The decoder: weights, matmul operands and KV have `config.dtype`, all else is float32.

    With bfloat16 the float32 residual stream costs no time that can be measured and halves the
    divergence from the float32 model (SmolLM2: mean KL 0.00023 against 0.00049 nats a token).
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = self.config = config

        def table(scale: float) -> nnx.Param:
            values = rngs.params.normal((c.V, c.D)) * scale
            return nnx.Param(values.astype(c.dtype), axes=("vocab", "embed"))

        self.embed = table(0.5)
        self.layers = Layers(c, rngs)
        self.norm = nnx.Param(jnp.ones((c.D,), c.dtype), axes=("embed",))
        if not c.tie:
            self.head = table(c.D**-0.5)

    def forward(self, kv: Any, x: StepInputs, *, block_size: int) -> tuple[jax.Array, Any]:
        """Hidden states f32[T, D] of the step's tokens before the last norm, and the KV with them.

        `x.tokens` are the real ids: seats are already resolved.
        """
        c = self.config
        cos, sin = rope.angles(c.rope, x.positions)

        def layer(
            hidden: jax.Array, kv: Any, index: jax.Array, w: Weights
        ) -> tuple[jax.Array, Any]:
            qkv = linear(rms_norm(hidden, w["norm1"], c.eps), w["qkv"], w.get("qkv_bias"))
            parts = split(qkv.astype(c.dtype), "qkv", (c.N * c.H, c.K * c.H, c.K * c.H))
            q, k, v = (part.reshape(len(part), -1, c.H) for part in parts)
            q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
            kv = kv_write(kv, index, x.slots, k, v)
            mixed = ragged_paged_attention(
                q,
                kv,
                index,
                x.block_tables,
                x.query_starts,
                x.kv_lens,
                x.num_decodes,
                block_size=block_size,
            )
            hidden = hidden + linear(mixed.reshape(-1, c.N * c.H), w["out"], w.get("out_bias"))
            hidden = hidden + gated_mlp(rms_norm(hidden, w["norm2"], c.eps), w)
            return hidden, kv

        weights = nnx.to_pure_dict(nnx.state(self.layers))
        return run_layers(layer, weights, self.embed[...][x.tokens].astype(jnp.float32), kv)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits f32[R, V] of hidden states [R, D]: last norm and head."""
        c = self.config
        head = self.embed if c.tie else self.head
        hidden = rms_norm(hidden, self.norm[...], c.eps)
        return jnp.einsum("rd,vd->rv", hidden, head[...], preferred_element_type=jnp.float32)


def places(config: LlamaConfig) -> dict[str, Place]:
    """Where each tensor of a Hugging Face checkpoint goes."""
    c = config
    q, k, v = c.N * c.H, (c.N + c.K) * c.H, (c.N + 2 * c.K) * c.H
    columns = {  # checkpoint name: parameter, and its part of the output axis
        "self_attn.q_proj": ("qkv", slice(0, q)),
        "self_attn.k_proj": ("qkv", slice(q, k)),
        "self_attn.v_proj": ("qkv", slice(k, v)),
        "self_attn.o_proj": ("out", slice(0, c.D)),
        "mlp.gate_proj": ("gate_up", slice(0, c.F)),
        "mlp.up_proj": ("gate_up", slice(c.F, 2 * c.F)),
        "mlp.down_proj": ("down", slice(0, c.D)),
    }
    found = {"model.embed_tokens.weight": Place("embed"), "model.norm.weight": Place("norm")}
    if not c.tie:
        found["lm_head.weight"] = Place("head")
    for layer in range(c.L):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = Place("layers.norm1", (layer,))
        found[f"{prefix}.post_attention_layernorm.weight"] = Place("layers.norm2", (layer,))
        for name, (param, part) in columns.items():
            place = Place(f"layers.{param}", (layer, part))
            found[f"{prefix}.{name}.weight"] = place
            has_bias = c.mlp_bias if name.startswith("mlp") else c.attention_bias
            if has_bias:
                found[f"{prefix}.{name}.bias"] = Place(f"layers.{param}_bias", (layer, part))
    return found
