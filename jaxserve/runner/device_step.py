"""The functions that run on the device, and the state they pass on from step to step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import EngineConfig
from jaxserve.runner import layer_calls, packing, sampler
from jaxserve.runner.programs import ProgramSpec
from jaxserve.runner.sharding import ONE_DEVICE, Sharding
from model_zoo.kv_layout import KVLayout
from model_zoo.partition import Kernels, constrain, kv_write
from model_zoo.step_inputs import packed_size, step_shapes, unpack
from pallas_kernels.ragged_paged_attention import api as attention

SEED_TOKENS = 512  # tokens of one `seed_counts` call

_WHY = {
    "backbone": "all layers over a step of up to {} tokens",
    "embed": "what the first layer is given, and the rotations of all layers",
    "layer": "one layer over a step of up to {} tokens",
    "keep": "the last layer's hidden states into their buffer",
    "head": "logits of up to {} rows",
    "greedy": "sampling when every row is greedy, up to {} rows",
    "random": "temperature, top-k, top-p, min-p, up to {} rows",
    "full": "penalties, bias, min_tokens and all of the above, up to {} rows",
    "score": "log-probabilities of given tokens, up to {} rows",
    "seed_counts": "token counts of a seat whose request has penalties, {} tokens at a time",
}


@dataclasses.dataclass(slots=True)
class DeviceState:
    """Arrays that live on the device between steps; all but `last_tokens` are donated to the next
    step.
    """

    kv: Any  # the whole cache, laid out by pallas_kernels
    hidden: jax.Array  # [token_budget, D]  output of the last backbone
    last_tokens: jax.Array  # i32[seats]    last sampled token of each seat
    counts: jax.Array | None  # i32[seats, V]  prompt flag and output count; None without penalties


class DeviceStep:
    """One model under one resolved config, as pure functions of fixed shapes.

    `graphdef` and `abstract_weights` come from `nnx.split` of the abstract module; `vocab_size` is
    the tokenizer's: ids at and above it are never sampled.
    """

    def __init__(
        self,
        graphdef: Any,
        abstract_weights: Any,
        model_config: Any,
        config: EngineConfig,
        vocab_size: int,
        sharding: Sharding = ONE_DEVICE,
    ):
        self.graphdef = graphdef
        self.sharding = sharding
        self._kernels: Kernels = "auto" if config.runner.kernels == "auto" else "xla"
        self.abstract_weights = sharding.weights(abstract_weights)
        self.model_config = model_config
        self.config = config
        self.vocab_size = vocab_size
        self.num_seats = config.scheduler.max_seqs
        self.num_blocks = config.cache.num_blocks
        self.num_slots = config.cache.num_blocks * config.cache.block_size
        self.blocks_per_row = -(-config.model.max_len // config.cache.block_size)
        self.layout: KVLayout = model_config.kv_layout
        self.dtype = jnp.dtype(config.model.dtype)
        self.by_call = self._calls_layers()

    def _calls_layers(self) -> bool:
        """One call a layer; see `layer_calls`."""
        asked, alone = self.config.runner.layers, self.sharding.mesh is None
        if asked == "calls" and not alone:
            raise ValueError(
                "runner.layers=calls is for one device without a mesh; leave it at auto"
            )
        if asked == "auto":
            return alone and self.sharding.device.platform == "cpu"
        return asked == "calls"

    def arrange(self, weights: Any) -> Any:
        """Weights as the backbone takes them; those given are used up."""
        return layer_calls.take_apart(weights) if self.by_call else weights

    def head_weights(self, arranged: Any) -> Any:
        """Of arranged weights what the head takes."""
        return arranged.shared if self.by_call else arranged

    def init_state(self) -> DeviceState:
        """Fresh device arrays: an empty cache."""

        def zeros(a: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros(a.shape, a.dtype, device=a.sharding)

        return DeviceState(**jax.tree.map(zeros, self.abstract_state()))

    def specs(self) -> list[ProgramSpec]:
        """Every program this config can need; switched-off features are not among them."""
        config, state = self.config, self.abstract_state()
        i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        weights = self.arrange(jax.tree.map(lambda leaf: leaf, self.abstract_weights))
        kv, hidden = state["kv"], state["hidden"]
        last_tokens, counts = state["last_tokens"], state["counts"]
        specs = []
        for tokens in reversed(config.buckets.tokens):
            packed = i32((packed_size(self.shapes(tokens)),))
            make = self._chain if self.by_call else self._loop
            specs.append(make(tokens, weights, kv, hidden, last_tokens, packed))
        weights = self.head_weights(weights)
        for rows in reversed(config.buckets.rows):
            shape = (rows, self.model_config.V)
            logits = jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=self.sharding.of(("rows", None), shape)
            )
            packed = i32((packing.packed_length(packing.sample_spec(rows)),))
            specs.append(self._spec("head", rows, self._head, (weights, hidden, i32((rows,)))))
            specs.append(
                self._spec("greedy", rows, self._greedy, (logits, i32((rows,)), last_tokens))
            )
            if self.sampler_kind("random") == "random" and config.sampling.random:
                specs.append(
                    self._spec("random", rows, self._random, (logits, packed, last_tokens))
                )
            if counts is not None:
                arguments = (logits, packed, last_tokens, counts)
                specs.append(self._spec("full", rows, self._full, arguments, (3,)))
            if config.sampling.logprobs:
                specs.append(self._spec("score", rows, self._score, (logits, i32((rows,)))))
        if counts is not None:
            flags = jax.ShapeDtypeStruct((SEED_TOKENS,), jnp.bool_)
            clear = jax.ShapeDtypeStruct((), jnp.bool_)
            arguments = (counts, i32(()), i32((SEED_TOKENS,)), flags, clear)
            specs.append(self._spec("seed_counts", SEED_TOKENS, self._seed_counts, arguments, (0,)))
        return specs

    def sampler_kind(self, asked: str) -> str:
        """The sampling program that serves rows asking for "greedy", "random" or "full".

        Where `full` exists it does the work of `random` as well, skipping what no row asks for: a
        second program would cost seconds of compiling and save nothing.
        """
        return "full" if asked == "random" and self.config.sampling.penalties else asked

    def padding_step(self, tokens: int) -> np.ndarray:
        """A packed step of bucket `tokens` in which everything is padding."""
        shapes = self.shapes(tokens)
        packed = np.zeros(packed_size(shapes), np.int32)
        x = unpack(packed, shapes)
        x.token_seats[:] = self.num_seats
        x.slots[:] = self.num_slots
        return packed

    def fill_slots(self, kv: Any, slots: jax.Array, value: float) -> Any:
        """Writes `value` into K and V of `slots`, i32[n], in every layer of a group: poison for
        proofs."""
        c = self.model_config
        rows = jnp.full((slots.shape[0], c.K, c.H), value, self.dtype)
        kv = jax.lax.fori_loop(
            0, self.layout.depth, lambda place, kv: kv_write(kv, place, slots, rows, rows), kv
        )
        return self.sharding.constrain_kv(kv)

    def shapes(self, tokens: int):
        return step_shapes(tokens, self.num_seats, self.blocks_per_row, self.layout.num_groups)

    def _init_kv(self) -> Any:
        c = self.model_config
        depth, block_size = self.layout.depth, self.config.cache.block_size
        shape = attention.kv_shape(depth, self.num_blocks, block_size, c.K, c.H)
        return attention.init_kv(shape, self.config.cache.dtype)

    def abstract_state(self) -> dict[str, Any]:
        c, seats = self.model_config, self.num_seats
        budget = self.config.buckets.tokens[-1]
        counts = None
        if self.config.sampling.penalties:
            counts = jax.ShapeDtypeStruct((seats, c.V), jnp.int32)
        state = {
            "kv": self.sharding.kv(jax.eval_shape(self._init_kv)),
            "hidden": jax.ShapeDtypeStruct((budget, c.D), self.dtype),
            "last_tokens": jax.ShapeDtypeStruct((seats,), jnp.int32),
            "counts": counts,
        }
        return self.sharding.place(state)

    def _spec(self, kind, bucket, function, arguments, donate=()) -> ProgramSpec:
        outputs = self.sharding.whole
        if kind == "backbone" and outputs is not None:
            kv = jax.tree.map(lambda leaf: leaf.sharding, arguments[1])
            outputs = (kv, outputs, outputs)
        elif kind == "head":
            outputs = self.sharding.of(("rows", None), (bucket, self.model_config.V))
        return ProgramSpec(
            kind,
            bucket,
            _WHY[kind].format(bucket),
            function,
            self.sharding.place(arguments),
            donate,
            outputs,
            self.sharding,
        )

    def _loop(self, tokens, *arguments) -> ProgramSpec:
        """The backbone, one program."""
        function = functools.partial(self._backbone, tokens)
        return self._spec("backbone", tokens, function, arguments, (1, 2))

    def _chain(self, tokens, weights, kv, hidden, last_tokens, packed) -> ProgramSpec:
        """The backbone, one call a layer."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        part = functools.partial
        embed, given = part(self._embed, tokens), (weights.shared, last_tokens, packed)
        x, turns = jax.eval_shape(embed, *given)
        parts = (
            self._spec("embed", tokens, embed, given),
            self._spec(
                "layer",
                tokens,
                part(self._layer, tokens),
                (weights.layers[0], x, kv, index, packed, turns),
                (1, 2),
            ),
            self._spec("keep", tokens, part(self._keep, tokens), (hidden, x, packed), (0,)),
        )
        why = _WHY["backbone"].format(tokens)
        join = functools.partial(layer_calls.Chain, self.model_config.L)
        return ProgramSpec("backbone", tokens, why, join, (), parts=parts)

    def _model(self, weights: Any) -> Any:
        if self.by_call:
            weights = layer_calls.put_together(weights, self.abstract_weights)
        return nnx.merge(self.graphdef, weights)

    def _inputs(self, tokens, packed, last_tokens):
        """The step's arrays, and in `tokens` the ids that only the device knows so far."""
        x = unpack(packed, self.shapes(tokens))
        known = x.token_seats >= self.num_seats
        seats = jnp.where(known, 0, x.token_seats)
        return x._replace(tokens=jnp.where(known, x.tokens, last_tokens[seats]))

    def _backbone(self, tokens, weights, kv, hidden, last_tokens, packed):
        x = self._inputs(tokens, packed, last_tokens)
        new, kv = self._model(weights).forward(kv, x, **self._options())
        return kv, *self._keep(tokens, hidden, new, packed)

    def _embed(self, tokens, weights, last_tokens, packed):
        x, model = self._inputs(tokens, packed, last_tokens), self._model(weights)
        return model.embed_tokens(x.tokens), model.turns(x.positions)

    def _layer(self, tokens, own, x, kv, index, packed, turns):
        inputs = unpack(packed, self.shapes(tokens))
        model = nnx.merge(self.graphdef, self.abstract_weights)
        return model.one_layer(x, kv, index, own, inputs, turns, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"block_size": self.config.cache.block_size, "kernels": self._kernels}

    def _keep(self, tokens, hidden, new, packed):
        """The buffer with the new hidden states, and a value that is ready when they are."""
        hidden = jax.lax.dynamic_update_slice(hidden, new.astype(hidden.dtype), (0, 0))
        return hidden, unpack(packed, self.shapes(tokens)).num_decodes

    def _head(self, weights, hidden, token_index):
        rows = jnp.minimum(token_index, hidden.shape[0] - 1)
        logits = self._model(weights).logits(hidden[rows])
        # Computed where its part of the head is, and moved then: else XLA moves the whole head.
        return constrain(logits, None, "vocab")

    def _greedy(self, logits, seats, last_tokens):
        sampled = self._by_rows(lambda logits: sampler.greedy(logits, self.vocab_size), logits)
        return self._sampled(sampled, seats, last_tokens)

    def _random(self, logits, packed, last_tokens):
        x = packing.unpack(packed, packing.sample_spec(logits.shape[0]))
        x = self.sharding.keep_whole(x)
        sampled = self._by_rows(
            lambda logits, x: sampler.random(logits, x, self.vocab_size), logits, x
        )
        return self._sampled(sampled, x.seats, last_tokens)

    def _full(self, logits, packed, last_tokens, counts):
        x = packing.unpack(packed, packing.sample_spec(logits.shape[0]))
        x = self.sharding.keep_whole(x)
        rows = counts[jnp.minimum(x.seats, self.num_seats - 1)]
        sampled = self._by_rows(
            lambda logits, rows, x: sampler.full(logits, rows, x, self.vocab_size), logits, rows, x
        )
        counts = sampler.add_counts(counts, x.seats, sampled.tokens)
        return *self._sampled(sampled, x.seats, last_tokens), counts

    def _sampled(self, sampled, seats, last_tokens):
        last_tokens = last_tokens.at[seats].set(sampled.tokens, mode="drop")
        return sampled.tokens, sampled.bad, last_tokens

    def _score(self, logits, targets):
        return self._by_rows(
            lambda logits, targets: sampler.logprobs(logits, targets, self.vocab_size),
            logits,
            targets,
        )

    def _by_rows(self, function, logits, *arrays):
        return self.sharding.by_rows(function, logits.shape[0], logits, *arrays)

    def _seed_counts(self, counts, seat, tokens, is_prompt, clear):
        return sampler.seed_counts(counts, seat, tokens, is_prompt, clear)
