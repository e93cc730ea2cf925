"""Before serving: run every program once for its cost, see what attention costs beside it, and
prove that every shape gives the same answers.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch.step import SampleInputs
from jaxserve.costs import GROUPS, CostModel, StepShape, no_step
from jaxserve.runner import packing
from jaxserve.runner.device_step import SEED_TOKENS
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.programs import Program
from model_zoo.step_inputs import unpack

CANARY_TOKENS = 64
_BESIDE = 3  # tokens of the second request
_PREFIX = 5  # tokens of the first at least before its first slice
_REFERENCE_STEPS = 4  # of the reference bucket for the canary, at most
_STEPS = 2  # of a bucket that is to be proved, at most
_LONG_S = 0.4  # beside which what only a first run does is little
_CONTEXT = 1024  # positions that attention is measured at
_CHUNK = 128  # tokens of the chunk that is measured, where there is such a bucket
# By the types of model and KV: shares of an entry of a hidden state, or of its root mean square
# where that is more.  Another order of a sum can round an entry of the KV the other way.
_TOLERANCE = {
    ("float32", "float32"): 2e-3,
    ("float32", "bfloat16"): 0.06,
    ("bfloat16", "bfloat16"): 0.12,
    ("bfloat16", "float32"): 0.12,
}


class ProofError(RuntimeError):
    """A program does not give the answers of the reference program; it must not serve."""


def warm_up(runner: ModelRunner) -> CostModel:
    """Runs every program on padding, those that take little twice; the last run is its measured
    cost.  What `prove` has run and measured counts.  Returns what steps cost."""
    logits_of = functools.lru_cache(maxsize=1)(functools.partial(_logits, runner))
    for program in runner.manifest:  # bucket by bucket
        run = _padding_run(runner, program, logits_of)
        while program.measured_s <= _LONG_S and not (program.uses >= 2 and program.measured_s):
            start = time.perf_counter()
            jax.block_until_ready(run())
            program.measured_s = time.perf_counter() - start
    costs = _with_attention(runner, runner.program_costs())
    runner.forget_uses()
    return costs


def _with_attention(runner: ModelRunner, costs: CostModel) -> CostModel:
    """With what a step of decodes and one of a chunk take longer at a long context than on padding.
    One run each says no more than that: all of it is put on the whole pieces that attention in
    plain XLA works in, for other back ends on contexts and query-key pairs."""
    buckets = runner.manifest.buckets("backbone")
    empty = no_step(runner.step.layout.windows)
    context = min(_CONTEXT, runner.config.model.max_len)
    rows = max((size for size in buckets if size <= GROUPS[0]), default=0)
    rows = min(rows, runner.step.num_seats)
    chunk = max((size for size in buckets if size <= _CHUNK), default=buckets[0])
    plain = runner.config.runner.kernels == "xla"
    if rows:
        shape = empty.with_singles(np.full(rows, context, np.int32))
        term = "turn_row" if plain else "single_context"
        costs = _measured(runner, costs, shape, term, [(context, 1)] * rows)
    if 1 < chunk <= context:
        shape = empty.with_chunk(context - chunk, chunk)
        term = "tile_pair" if plain else "chunk_pair"
        costs = _measured(runner, costs, shape, term, [(context, chunk)])
    return costs


def _measured(
    runner: ModelRunner,
    costs: CostModel,
    shape: StepShape,
    term: str,
    rows: list[tuple[int, int]],  # context, tokens
) -> CostModel:
    """With `term` such that a step of `shape` takes what a run of it does."""
    step, state = runner.step, runner.state
    bucket = next(size for size in costs.tokens if size >= shape.tokens)
    packed = step.padding_step(bucket)  # nothing is written; block 0 is read all over
    x = unpack(packed, step.shapes(bucket))
    x.num_decodes[0] = sum(tokens == 1 for _, tokens in rows)
    for row, (context, tokens) in enumerate(rows):
        x.kv_lens[row] = context
        x.query_starts[row + 1 :] = x.query_starts[row] + tokens
    program, start = runner.manifest.get("backbone", bucket), time.perf_counter()
    state.kv, state.hidden, mark = program(
        runner.weights, state.kv, state.hidden, state.last_tokens, packed
    )
    jax.block_until_ready(mark)
    seconds = time.perf_counter() - start
    shape = shape._replace(bucket=bucket)
    pieces = {
        "single_context": shape.single_context,
        "turn_row": shape.turn_rows,
        "chunk_pair": shape.chunk_pairs,
        "tile_pair": shape.tile_pairs,
    }
    cost = max(0.0, seconds - costs.program_s(bucket)) / pieces[term]
    return dataclasses.replace(costs, **{term: cost})


def _logits(runner: ModelRunner, rows: int) -> jax.Array:
    """Of `rows` padding rows."""
    weights, head = runner.step.head_weights(runner.weights), runner.manifest.get("head", rows)
    return jax.block_until_ready(head(weights, runner.state.hidden, np.zeros(rows, np.int32)))


def _padding_run(
    runner: ModelRunner, program: Program, logits_of: Callable[[int], jax.Array]
) -> Callable[[], Any]:
    """A call of `program` in which everything is padding; its inputs are ready.  `logits_of` so
    many rows."""
    step, state, weights = runner.step, runner.state, runner.weights
    kind, bucket = program.spec.kind, program.spec.bucket
    seats = np.full(bucket, step.num_seats, np.int32)

    def backbone() -> Any:
        packed = step.padding_step(bucket)
        state.kv, state.hidden, mark = program(
            weights, state.kv, state.hidden, state.last_tokens, packed
        )
        return mark

    def seed_counts() -> Any:
        tokens = np.full(SEED_TOKENS, step.vocab_size, np.int32)
        flags, clear = np.zeros(SEED_TOKENS, bool), np.asarray(True)
        state.counts = program(state.counts, np.asarray(0, np.int32), tokens, flags, clear)
        return state.counts

    if kind == "backbone":
        return backbone
    if kind == "seed_counts":
        return seed_counts
    if kind == "head":
        return lambda: _logits(runner, bucket)
    logits = logits_of(bucket)
    if kind == "greedy":
        return lambda: program(logits, seats, state.last_tokens)
    if kind == "score":
        return lambda: program(logits, np.zeros(bucket, np.int32))
    packed = packing.pack(_neutral_samples(bucket, step.model_config.V, seats))
    if kind == "random":
        return lambda: program(logits, packed, state.last_tokens)

    def full() -> Any:
        *sampled, state.counts = program(logits, packed, state.last_tokens, state.counts)
        return sampled

    return full


def _neutral_samples(rows: int, vocab: int, seats: np.ndarray) -> SampleInputs:
    """Rows that sample greedily with every option at its neutral value."""
    zeros = SampleInputs(*(np.zeros(s.shape, s.dtype) for s in packing.sample_spec(rows)))
    return zeros._replace(
        seats=seats,
        top_k=zeros.top_k + vocab,
        top_p=zeros.top_p + 1,
        repetition=zeros.repetition + 1,
        stop_ids=zeros.stop_ids + vocab,
        bias_ids=zeros.bias_ids + vocab,
    )


def prove(runner: ModelRunner) -> float:
    """Raises ProofError unless every token bucket gives the hidden states of the reference: the
    smallest that takes the canary in a few steps.

    Two canary prompts run through each bucket: the end of one as a chunk or several, beside the
    last token of the other as a decode.  What comes before is the reference's, and a decode after
    it reads what the bucket wrote.  Cache slots that nobody wrote hold NaN, pad tokens are random
    ids at the last position, pad rows name real blocks.  Returns the largest difference seen, as
    `_TOLERANCE` counts it.
    """
    buckets = runner.manifest.buckets("backbone")
    enough = (size for size in buckets if size * _REFERENCE_STEPS >= CANARY_TOKENS)
    small = next(enough, buckets[-1])
    canary = _Canary(runner, small)
    reference, worst = canary.reference, 0.0
    rms = np.sqrt(np.mean(np.square(reference), axis=-1, keepdims=True)) + 1e-6
    scale = np.maximum(rms, np.abs(reference))  # some models have entries of a hundred times that
    limit = _TOLERANCE[runner.config.model.dtype, runner.config.cache.dtype]
    for bucket in [size for size in buckets if size != small] or [small]:
        after = small if bucket == buckets[0] else buckets[0]  # of those proved, the fastest
        difference = np.max(np.abs(canary.prove(bucket, after=after) - reference) / scale)
        if not difference <= limit:
            raise ProofError(
                f"program backbone[{bucket}] differs from backbone[{small}] by "
                f"{difference:.3g} of a hidden state's size; allowed: {limit}. Do not serve with "
                f"this bucket: leave it out of buckets.tokens, and report the device and versions"
            )
        worst = max(worst, float(difference))
    canary.clean()
    runner.compiles.reset()
    return worst


type _Piece = tuple[int, int, int]  # request, first token, end


def _steps(pieces: list[_Piece], size: int) -> list[list[_Piece]]:
    """`pieces` in steps of `size` tokens, cut where they do not fit."""
    steps: list[list[_Piece]] = []
    left = 0
    for request, start, end in pieces:
        while start < end:
            if not left:
                steps.append([])
                left = size
            taken = min(left, end - start)
            steps[-1].append((request, start, start + taken))
            start, left = start + taken, left - taken
    return steps


class _Canary:
    """Two requests: a prompt that is cut in slices and decodes one token, and a short one whose
    last token runs beside the first slice.  `reference`: hidden states of all their tokens by the
    bucket `small`, each request alone, f32[length + 1 + second, D].
    """

    def __init__(self, runner: ModelRunner, small: int):
        self.runner, step = runner, runner.step
        block_size = runner.config.cache.block_size
        groups = step.layout.num_groups
        blocks = min(
            step.num_blocks // groups,
            -(-(CANARY_TOKENS + 1) // block_size) + 1,
            step.blocks_per_row + 1,
        )
        self.blocks = np.arange(groups * blocks, dtype=np.int32).reshape(groups, blocks)
        two = blocks > 1 and step.num_seats > 1
        self.second = min(_BESIDE, block_size, runner.config.model.max_len) if two else 0
        own = blocks - 1 if self.second else blocks
        room = min(own * block_size, runner.config.model.max_len) - 1
        self.length = max(1, min(CANARY_TOKENS, room))
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, step.vocab_size, self.length + 1 + _BESIDE).astype(np.int32)
        self._fill = jax.jit(step.fill_slots, donate_argnums=0, static_argnums=2)
        self._rng = rng
        self._set(np.nan)
        places = self.length + 1 + self.second
        self.reference = np.full((places, step.model_config.D), np.nan, np.float32)
        for piece in [(1, 0, self.second), (0, 0, self.length), (0, self.length, self.length + 1)]:
            self._run(small, [piece], self.reference)

    def prove(self, bucket: int, *, after: int) -> np.ndarray:
        """`reference` with the hidden states of the prompt's end and of the second request's last
        token by `bucket`, and that of the decode behind them by `after`.

        To be called with ever larger buckets: the KV before the prompt's end is still that of the
        reference then.
        """
        length, second = self.length, self.second
        most = _STEPS * bucket - min(1, second)
        begins = max(min(_PREFIX, length - 1), length - most), max(0, second - 1)
        self._set(np.nan, begins)
        found = self.reference.copy()
        self._run(bucket, [(1, begins[1], second), (0, begins[0], length)], found)
        self._run(after, [(0, length, length + 1)], found)
        return found

    def _run(self, bucket: int, pieces: list[_Piece], found: np.ndarray) -> None:
        """Steps over `pieces`, those of one token first; their hidden states go into `found`."""
        for rows in _steps(pieces, bucket):
            hidden, at = self._step(bucket, rows), 0
            for request, start, stop in rows:
                place = self._place(request, start)
                found[place : place + stop - start] = hidden[at : at + stop - start]
                at += stop - start

    def _place(self, request: int, token: int) -> int:
        """Of a request's token among those of both."""
        return (self.length + 1) * request + token

    def clean(self) -> None:
        self._set(0.0)

    def _set(self, value: float, begins: tuple[int, int] = (0, 0)) -> None:
        """Writes `value` into the slots of both requests from these positions on."""
        size = self.runner.config.cache.block_size
        slots = np.arange(self.blocks.size * size, dtype=np.int32).reshape(len(self.blocks), -1)
        kept = np.zeros(slots.shape[1], np.bool_)
        kept[: begins[0]] = True
        if self.second:
            kept[-size:][: begins[1]] = True
        slots = np.where(kept, self.runner.num_slots, slots).reshape(-1)  # past the end: nowhere
        with self.runner.step.sharding.context():
            self.runner.state.kv = self._fill(self.runner.state.kv, jnp.asarray(slots), value)

    def _step(self, bucket: int, rows: list[_Piece]) -> np.ndarray:
        step, state = self.runner.step, self.runner.state
        block_size = self.runner.config.cache.block_size
        packed = step.padding_step(bucket)
        x = unpack(packed, step.shapes(bucket))
        x.tokens[:] = self._rng.integers(0, step.vocab_size, bucket)
        x.positions[:] = self.runner.config.model.max_len - 1
        groups, last = len(self.blocks), self.blocks[:, -1:]
        tables = x.block_tables.reshape(groups, step.num_seats, step.blocks_per_row)
        slots = x.slots.reshape(groups, bucket)
        tables[:] = last[:, :, None]
        end = 0
        for row, (request, start, stop) in enumerate(rows):
            own = last if request else self.blocks
            begin, end = end, end + stop - start
            positions = np.arange(start, stop, dtype=np.int32)
            place = self._place(request, start)
            x.tokens[begin:end] = self.tokens[place : place + stop - start]
            x.positions[begin:end] = positions
            of_token = own[:, positions // block_size]
            slots[:, begin:end] = of_token * block_size + positions % block_size
            width = min(own.shape[1], step.blocks_per_row)
            tables[:, row, :width] = own[:, :width]
            x.kv_lens[row] = stop
            x.query_starts[row + 1 :] = end
        x.num_decodes[0] = sum(stop - start == 1 for _, start, stop in rows)  # they come first
        program = self.runner.manifest.get("backbone", bucket)
        began = time.perf_counter()
        state.kv, state.hidden, _ = program(
            self.runner.weights, state.kv, state.hidden, state.last_tokens, packed
        )
        hidden = np.asarray(state.hidden)
        program.measured_s = time.perf_counter() - began
        return hidden[:end].astype(np.float32)
