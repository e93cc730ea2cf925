"""Owns the device: weights, the donated KV array, per-seat state, and one compiled program a
bucket.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxserve.batch.step import Batch, Logprobs, SeatReset, StepResult
from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel
from jaxserve.runner import agreement, packing
from jaxserve.runner.device_step import SEED_TOKENS, DeviceState, DeviceStep
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.programs import CompileCounter, Manifest, compile_programs

_TOUCHED = 4096  # slots at a time


@dataclasses.dataclass(slots=True)
class _Flight:
    """A dispatched step: what to read when the device has finished it."""

    tokens: jax.Array | None
    bad: jax.Array | None
    logprobs: Any
    scores: list[Any]
    mark: jax.Array  # ready when the backbone is done
    dispatched: float


class ModelRunner:
    """Runs batches in the order in which they are dispatched.  One thread dispatches; results are
    read by another.

    Nothing compiles after `warm_up`: a batch of an undeclared shape raises KeyError.
    """

    def __init__(
        self,
        step: DeviceStep,
        config: EngineConfig,
        *,
        threads: int = 1,
        store: ProgramStore | None = None,
        state: Callable[[], DeviceState] | None = None,  # `step.init_state`, if already begun
    ):
        self.config = config
        self.step = step
        programs = compile_programs(
            step.specs(), threads=threads, stored=config.runner.bundle, store=store
        )
        self.manifest = Manifest(programs)
        self.agreement = agreement.of_processes()
        self.compiles = CompileCounter()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-read")
        self._last_done = 0.0
        self.weights: Any = None
        self.state = (state or step.init_state)()

    def load(self, weights: Any) -> None:
        """Takes the model's weights, a pytree like `step.abstract_weights`."""
        expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), self.step.abstract_weights)
        given = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), weights)
        if expected != given:
            raise ValueError(
                f"weights do not fit the compiled programs: {given} instead of {expected}"
            )
        self.weights = self.step.arrange(weights)

    @property
    def num_slots(self) -> int:
        return self.step.num_slots

    @property
    def compiles_after_warmup(self) -> int:
        return self.compiles.count

    def dispatch(self, batch: Batch) -> "Future[StepResult]":
        """Sends one step to the device and returns at once; steps run in the order of dispatch."""
        dispatched = time.perf_counter()
        if self.agreement is not None:
            self.agreement.add(batch)
        if self.state.hidden.is_deleted():  # an earlier dispatch failed after it gave the KV away
            self.state = self.step.init_state()
        for reset in batch.resets:
            self._seed_counts(reset)
        state = self.state
        state.kv, state.hidden, mark = self.manifest.get("backbone", batch.token_bucket)(
            self.weights, state.kv, state.hidden, state.last_tokens, batch.packed
        )
        flight = _Flight(None, None, None, [], mark, dispatched)
        if batch.samples is not None:
            self._sample(batch, flight)
        for score in batch.scores:
            rows = len(score.targets)
            logits = self._logits(rows, score.token_index)
            flight.scores.append(self.manifest.get("score", rows)(logits, score.targets))
        return self._reader.submit(self._read, flight)

    def result(self, handle: "Future[StepResult]") -> StepResult:
        """Waits for a dispatched step."""
        return handle.result()

    def forget_uses(self) -> None:
        """Counts of uses and compiles start again: what ran so far was not service."""
        for program in self.manifest:
            program.uses = 0
        self.compiles.reset()

    def touch_kv(self) -> None:
        """Writes every slot: memory that was never written reads faster than any in service."""
        fill = jax.jit(self.step.fill_slots, donate_argnums=0, static_argnums=2)
        size = min(_TOUCHED, self.num_slots)
        with self.step.sharding.context():
            for start in range(0, self.num_slots, size):
                slots = np.arange(start, start + size, dtype=np.int32) % self.num_slots
                self.state.kv = fill(self.state.kv, slots, 0.01)
        jax.block_until_ready(self.state.kv)
        self.forget_uses()

    def close(self) -> None:
        """Waits for what is in flight and gives the device memory back."""
        self._reader.shutdown(wait=True)
        self.weights = None
        del self.state

    def program_costs(self) -> CostModel:
        """Seconds that one run of each program took in warm-up: no attention, since all was
        padding."""
        tokens, rows = self.manifest.buckets("backbone"), self.manifest.buckets("head")

        def seconds(kind: str, bucket: int) -> float:
            return self.manifest.get(kind, bucket).measured_s

        kinds = [kind for kind in ("greedy", "random", "full") if self.manifest.buckets(kind)]
        return CostModel(
            tokens=tokens,
            program=tuple(seconds("backbone", bucket) for bucket in tokens),
            rows=rows,
            sampling={
                kind: tuple(seconds("head", row) + seconds(kind, row) for row in rows)
                for kind in kinds
            },
        )

    def _logits(self, rows: int, token_index: np.ndarray) -> jax.Array:
        weights = self.step.head_weights(self.weights)
        return self.manifest.get("head", rows)(weights, self.state.hidden, token_index)

    def _sample(self, batch: Batch, flight: _Flight) -> None:
        samples, state, rows = batch.samples, self.state, batch.row_bucket
        assert samples is not None
        kind = self.step.sampler_kind(batch.sampler)
        program = self.manifest.get(kind, rows)
        logits = self._logits(rows, samples.token_index)
        if kind == "greedy":
            sampled = program(logits, samples.seats, state.last_tokens)
        elif kind == "random":
            sampled = program(logits, packing.pack(samples), state.last_tokens)
        else:
            *sampled, state.counts = program(
                logits, packing.pack(samples), state.last_tokens, state.counts
            )
        flight.tokens, flight.bad, state.last_tokens = sampled
        if batch.logprobs:
            flight.logprobs = self.manifest.get("score", rows)(logits, flight.tokens)

    def _seed_counts(self, reset: SeatReset) -> None:
        program = self.manifest.get("seed_counts", SEED_TOKENS)
        for start in range(0, max(1, len(reset.tokens)), SEED_TOKENS):
            part = reset.tokens[start : start + SEED_TOKENS]
            tokens = np.full(SEED_TOKENS, self.step.vocab_size, np.int32)
            tokens[: len(part)] = part
            is_prompt = np.arange(start, start + SEED_TOKENS) < reset.num_prompt
            clear = np.asarray(start == 0)
            seat = np.asarray(reset.seat, np.int32)
            self.state.counts = program(self.state.counts, seat, tokens, is_prompt, clear)

    def _read(self, flight: _Flight) -> StepResult:
        tokens = flight.tokens if flight.tokens is not None else flight.mark
        tokens = np.asarray(tokens)  # waits for the device
        bad = np.zeros(0, bool) if flight.bad is None else np.asarray(flight.bad)
        logprobs = None if flight.logprobs is None else _to_host(flight.logprobs)
        scores = tuple(_to_host(score) for score in flight.scores)
        done = time.perf_counter()
        device_s = done - max(flight.dispatched, self._last_done)
        self._last_done = done
        if flight.tokens is None:
            tokens = np.zeros(0, np.int32)
        return StepResult(tokens, bad, logprobs, scores, device_s)


def _to_host(arrays: tuple[jax.Array, ...]) -> Logprobs:
    return Logprobs(*(np.asarray(array) for array in arrays))
