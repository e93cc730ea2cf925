"""Turns a plan into the arrays of one step: fresh, read-only, nothing negative.

JAX on the CPU may use a numpy buffer in place, so an array that was handed to a step is never
edited again: everything here is made anew for each step, and marked read-only before it leaves.
"""

import bisect
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.batch.logprobs import scored_targets
from jaxserve.batch.samples import SeatTable
from jaxserve.batch.shape import shape_of
from jaxserve.batch.step import Batch, SampleInputs, ScoreInputs, SeatReset
from jaxserve.config import EngineConfig
from jaxserve.costs import no_step
from jaxserve.kv.groups import FULL, Windows
from jaxserve.request import Request
from jaxserve.scheduler.plan import Ints, Plan
from model_zoo.step_inputs import StepInputs, packed_size, step_shapes, unpack


class _Rows(NamedTuple):
    """The rows of a step."""

    seats: Ints
    starts: Ints
    counts: Ints  # tokens
    ends: Ints  # of the context: starts + counts
    samples: NDArray[np.bool_]


class _Greedy(NamedTuple):
    """How the rows of a step of decodes alone were sampled: likely, those of the next one too.
    `Decoding` makes the array of their seats anew whenever one of them changes, and as many rows
    go into the same bucket."""

    seats: Ints
    inputs: SampleInputs
    logprobs: bool


class BatchBuilder:
    """`config` is resolved; `tables` i32[G, seats, P] are the block tables of each group of layers
    by seat, kept by the KV manager and only read here; `vocab_size` V; `windows` are those of the
    groups."""

    def __init__(
        self, config: EngineConfig, tables: Ints, vocab_size: int, windows: Windows = FULL
    ) -> None:
        groups, rows, blocks = tables.shape
        self._tables = tables if groups > 1 else tables[0]
        self._block_size = config.cache.block_size
        self._num_slots = config.cache.num_blocks * config.cache.block_size
        self._row_buckets = config.buckets.rows
        self._rows = rows
        self._shapes = {
            size: step_shapes(size, rows, blocks, groups) for size in config.buckets.tokens
        }
        self._seat_table = SeatTable(config, vocab_size)
        self._empty = no_step(windows)
        self._ones, self._all = np.ones(rows, np.int32), np.ones(rows, np.bool_)
        self._upwards = np.arange(rows + 1, dtype=np.int32)
        _freeze(self._ones, self._all, self._upwards)
        self._greedy: _Greedy | None = None

    def build(self, plan: Plan) -> Batch:
        """The step of a plan with at least one chunk."""
        for request in plan.admitted:
            self._seat_table.sit(request)
        rows = self._rows_of(plan)
        shapes = self._shapes[plan.bucket]
        packed = np.zeros(packed_size(shapes), np.int32)
        inputs = unpack(packed, shapes)
        self._fill(inputs, plan, rows)
        _freeze(packed, *inputs)
        sampler, sampled, logprobs = "none", None, False
        num_samples = int(np.count_nonzero(rows.samples))
        if num_samples:
            sampler, sampled, logprobs = self._sample(inputs, rows, plan)
        return Batch(
            packed=packed,
            inputs=inputs,
            num_tokens=plan.num_tokens,
            num_samples=num_samples,
            sampler=sampler,
            samples=sampled,
            logprobs=logprobs,
            scores=self._scores(plan) if self._seat_table.any_scores(rows.seats) else (),
            resets=tuple(_reset(r) for r in plan.admitted if r.sampling.has_penalties),
            shape=shape_of(
                plan, 0 if sampled is None else len(sampled.seats), sampler, self._empty
            ),
        )

    def _rows_of(self, plan: Plan) -> _Rows:
        decodes, chunks = plan.decodes, plan.chunks
        count = len(decodes.requests)
        seats, starts = decodes.seats, decodes.starts
        ones, samples = self._ones[:count], self._all[:count]
        if not chunks:
            return _Rows(seats, starts, ones, starts + 1, samples)
        seats = np.concatenate([seats, np.array([c.request.seat for c in chunks], np.int32)])
        starts = np.concatenate([starts, np.array([c.start for c in chunks], np.int32)])
        counts = np.concatenate([ones, np.array([c.num_tokens for c in chunks], np.int32)])
        samples = np.concatenate([samples, np.array([c.samples for c in chunks], np.bool_)])
        return _Rows(seats, starts, counts, starts + counts, samples)

    def _fill(self, inputs: StepInputs, plan: Plan, of: _Rows) -> None:
        """Writes every field of `inputs`."""
        seats, starts, counts, ends = of.seats, of.starts, of.counts, of.ends
        rows, total, singles = len(seats), plan.num_tokens, plan.num_singles
        width = -(-int(ends.max()) // self._block_size)
        inputs.block_tables[..., :rows, :width] = self._tables[..., seats, :width]
        inputs.kv_lens[:rows] = ends
        inputs.query_starts[rows + 1 :] = total
        inputs.num_decodes[0] = singles
        row_of = seats
        positions = starts
        if singles == rows:
            inputs.query_starts[: rows + 1] = self._upwards[: rows + 1]
        else:
            np.cumsum(counts, out=inputs.query_starts[1 : rows + 1])
            row_of = np.repeat(seats, counts)
            first = np.repeat(starts - inputs.query_starts[:rows], counts)
            positions = first + np.arange(total, dtype=np.int32)
        inputs.positions[:total] = positions
        # The slot is block * block_size + position - index * block_size: numpy divides faster than
        # it takes a rest.
        index = positions // self._block_size
        blocks = self._tables[..., row_of, index]
        inputs.slots[..., :total] = (blocks - index) * self._block_size + positions
        inputs.slots[..., total:] = self._num_slots
        self._fill_tokens(inputs, plan)

    def _fill_tokens(self, inputs: StepInputs, plan: Plan) -> None:
        """Token ids; a token the host does not know yet is its seat's last sampled one."""
        decodes = plan.decodes
        at = len(decodes.requests)
        inputs.token_seats[:] = self._rows
        np.copyto(inputs.token_seats[:at], decodes.seats, where=decodes.on_device)
        if not decodes.on_device.all():
            last = np.array([tokens[-1] for tokens in decodes.tokens], np.int32)
            np.copyto(inputs.tokens[:at], last, where=~decodes.on_device)
        for request, start, num_tokens, _, _ in plan.chunks:
            inputs.tokens[at : at + num_tokens] = request.tokens[start : start + num_tokens]
            at += num_tokens

    def _sample(self, inputs: StepInputs, of: _Rows, plan: Plan) -> tuple[str, SampleInputs, bool]:
        seats, ends, before = of.seats, of.ends, self._greedy
        if before is not None and before.seats is seats:
            return "greedy", before.inputs, before.logprobs
        last = inputs.query_starts[1 : len(seats) + 1] - 1
        if not of.samples.all():
            last, seats, ends = last[of.samples], seats[of.samples], ends[of.samples]
        rows = self._row_buckets[bisect.bisect_left(self._row_buckets, len(seats))]
        bucket = rows, plan.bucket
        sampler, sampled, logprobs = self._seat_table.gather(seats, last, ends, bucket)
        if sampler == "greedy" and not plan.chunks:
            self._greedy = _Greedy(seats, sampled, logprobs)
        return sampler, sampled, logprobs

    def _scores(self, plan: Plan) -> tuple[ScoreInputs, ...]:
        """Prompt tokens to score, in slices of the largest row bucket: bounded memory."""
        index: list[int] = []
        targets: list[int] = []
        at = plan.decode_tokens
        for chunk in plan.chunks:
            wanted = scored_targets(chunk)
            index.extend(range(at, at + len(wanted)))
            targets.extend(wanted)
            at += chunk.num_tokens
        rows = self._row_buckets[-1]
        return tuple(
            _score_slice(index[i : i + rows], targets[i : i + rows], rows, plan.bucket)
            for i in range(0, len(targets), rows)
        )


def _score_slice(index: list[int], targets: list[int], rows: int, bucket: int) -> ScoreInputs:
    score = ScoreInputs(np.full(rows, bucket, np.int32), np.zeros(rows, np.int32))
    score.token_index[: len(index)] = index
    score.targets[: len(targets)] = targets
    _freeze(*score)
    return score


def _reset(request: Request) -> SeatReset:
    tokens = np.array(request.tokens, np.int32)
    _freeze(tokens)
    return SeatReset(request.seat, tokens, request.num_prompt)


def _freeze(*arrays: NDArray[Any]) -> None:
    for array in arrays:
        array.setflags(write=False)
