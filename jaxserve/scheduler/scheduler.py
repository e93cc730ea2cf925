"""Decides which tokens of which requests run in the next step, and records what came back.

There is no prefill phase and no decode phase: a request has `num_computed` tokens and needs all the
tokens it has.  Decodes run first, then partial prefills and the head of the queue in policy order.
Nobody starves: at most `max_seqs <= token_budget` requests run, so whenever one of them is in its
prefill at least one token is left for it, and policy order is subject to aging.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from jaxserve.config import EngineConfig
from jaxserve.kv.manager import KVManager
from jaxserve.request import Output, Request, Status
from jaxserve.scheduler import policy, snap
from jaxserve.scheduler.plan import Chunk, Plan, Unused
from jaxserve.scheduler.waiting import WaitingQueue

MAX_BACKOFF = 32  # steps without admission after a preemption, at most

# Builds a NamedTuple without its slow Python constructor.
_new = cast(Callable[[type[Any], tuple[Any, ...]], Any], cast(Any, tuple).__new__)


@dataclasses.dataclass(slots=True, eq=False)
class _Draft:
    """A step while it is being decided."""

    left: int  # tokens of the budget
    decodes: list[Chunk] = dataclasses.field(default_factory=list[Chunk])
    prefills: list[tuple[Request, int]] = dataclasses.field(
        default_factory=list[tuple[Request, int]]
    )
    partials: int = 0  # prompts in the middle of their prefill after this step
    longs: int = 0  # of those, long ones
    admitted: list[Request] = dataclasses.field(default_factory=list[Request])
    preempted: list[Request] = dataclasses.field(default_factory=list[Request])
    closed: Unused | None = None  # why nobody more is admitted
    indivisible: bool = False  # a whole chunk did not fit
    hit_tokens: int = 0
    resume_hit_tokens: int = 0


class Scheduler:
    """`config` is resolved.  Invariant between calls: `running` is exactly the requests that have a
    seat, oldest admission first, and `kv` agrees with their blocks."""

    def __init__(self, config: EngineConfig, kv: KVManager) -> None:
        rules = config.scheduler
        self.kv = kv
        self.running: list[Request] = []
        self.costs = snap.padded_tokens(config.buckets.tokens)
        self._rules = rules
        self._deterministic = config.runner.deterministic
        # Whole chunks of one size (SARATHI, or canonical borders) instead of whatever fits.
        self._equal_chunks = rules.mode == "fixed" or config.runner.deterministic
        self._one_prefill = rules.mode == "fixed"
        self._spare = math.ceil(rules.watermark * kv.num_blocks)
        self._short = WaitingQueue(rules.policy, rules.aging_steps)
        self._long = WaitingQueue(rules.policy, rules.aging_steps)
        self._seats = list(range(rules.max_seqs - 1, -1, -1))
        self._step = 0
        self._backoff = 1  # steps without admission after the next preemption
        self._admit_from = 0  # first step that may admit again

    @property
    def num_waiting(self) -> int:
        return len(self._short) + len(self._long)

    def add(self, request: Request) -> None:
        """Queues a new request; what can never fit has been refused before."""
        self._enqueue(request)

    def schedule(self) -> Plan:
        """The next step; the requests' progress counts it as done from here on."""
        self._step += 1
        draft = _Draft(left=self._rules.token_budget)
        prefills = self._take_decodes(draft)
        shorts = [r for r in prefills if self._equal_chunks or not self._is_long(r)]
        longs = [r for r in prefills if not self._equal_chunks and self._is_long(r)]
        draft.partials, draft.longs = len(prefills), sum(map(self._is_long, prefills))
        kept = policy.long_share(
            draft.left, sum(r.num_pending for r in longs), bool(shorts or len(self._short))
        )
        draft.left -= kept
        self._take_prefills(draft, shorts, admit=True)
        draft.left += kept
        self._take_prefills(draft, longs, admit=False)
        if draft.preempted:
            self._after_preemptions(draft)
        return self._seal(draft)

    def update(
        self, chunks: Sequence[Chunk], tokens: Sequence[int], bad: frozenset[int]
    ) -> list[Output]:
        """Records a step that has returned.

        `tokens`: one a chunk that samples, in order; `bad`: those of their indices whose logits
        were not finite.  Results for requests preempted or ended since then are dropped.
        """
        outputs: list[Output] = []
        size, publish, add = self.kv.block_size, self._publish, outputs.append
        row = -1
        for request, start, num_tokens, epoch, samples in chunks:
            row += samples
            if request.epoch != epoch:
                continue
            if (start + num_tokens) % size < num_tokens:  # the chunk filled a block
                publish(request, start, num_tokens)
            if not samples:
                if start + num_tokens == request.max_total:  # only scored
                    self.finish(request, "length")
                    add(Output(request, (), None, None, "length"))
                continue
            token = tokens[row]
            request.num_in_flight -= 1
            if row in bad:
                self.finish(request, "error", "the model's logits were not finite")
                add(Output(request, (), None, None, "error"))
                continue
            known = request.tokens
            known.append(token)
            if token in request.stop_ids:
                self.finish(request, "stop")
            elif len(known) >= request.max_total:
                self.finish(request, "length")
            add(_new(Output, (request, (token,), None, None, request.finish_reason)))
        return outputs

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request and frees all it holds; the only place that does.  Idempotent."""
        if request.status is Status.FINISHED:
            return
        was_running = request.status is Status.RUNNING
        queue = self._queue(request)
        request.status, request.finish_reason, request.error = Status.FINISHED, reason, error
        request.epoch += 1
        request.num_in_flight = 0
        if was_running:
            self.running.remove(request)
            self._leave_seat(request)
            self._backoff = max(1, self._backoff // 2)
            self._admit_from = 0
        elif request.last_step >= 0:
            queue.left()

    # -- decodes ---------------------------------------------------------------------------------

    def _take_decodes(self, draft: _Draft) -> list[Request]:
        """Gives every decoding request its token; returns those in their prefill.

        The loop runs for every row of every step, hence its plain form.
        """
        size, add = self.kv.block_size, draft.decodes.append
        prefills: list[Request] = []
        for request in self.running:
            start = request.num_computed
            pending = len(request.tokens) + request.num_in_flight - start
            if pending > 1 or start < request.num_prompt:
                prefills.append(request)
            elif pending == 1 and start + 1 < request.max_total:
                if start >= len(request.blocks) * size and not self._grow(draft, request, 1):
                    continue
                request.num_computed = start + 1
                request.num_in_flight += 1
                add(_new(Chunk, (request, start, 1, request.epoch, True)))
        draft.left = self._rules.token_budget - len(draft.decodes)
        return [r for r in prefills if r.status is Status.RUNNING and r.num_pending]

    # -- prefills --------------------------------------------------------------------------------

    def _take_prefills(self, draft: _Draft, partial: list[Request], admit: bool) -> None:
        """Partial prefills and, with `admit`, the head of the queue, merged in policy order."""
        partial = sorted(partial, key=self._order)
        while draft.left > 0 and not (self._one_prefill and draft.prefills):
            head = self._head(draft) if admit else None
            if partial and (head is None or self._order(partial[0]) < self._order(head)):
                self._continue(draft, partial.pop(0))
            elif head is not None:
                self._admit(draft, head)
            else:
                return
        if admit and self.num_waiting and draft.left > 0 and draft.closed is None:
            draft.closed = Unused.POLICY

    def _continue(self, draft: _Draft, request: Request) -> None:
        if request.status is not Status.RUNNING:
            return
        num_tokens = self._chunk_size(request.num_pending, draft)
        if num_tokens and self._grow(draft, request, num_tokens):
            self._give(draft, request, num_tokens)

    def _head(self, draft: _Draft) -> Request | None:
        """The request to admit next; None, with the reason in `draft.closed`, for nobody."""
        if draft.closed is not None or not self.num_waiting:
            return None
        if not self._seats:
            draft.closed = Unused.MAX_SEQS
            return None
        if draft.preempted or (self.running and self._step < self._admit_from):
            draft.closed = Unused.KV
            return None
        heads = [self._short.peek(self._step)]
        if draft.longs < self._rules.max_long_partial_prefills:
            heads.append(self._long.peek(self._step))
        known = [head for head in heads if head is not None]
        if not known:
            draft.closed = Unused.POLICY
            return None
        return min(known, key=self._order)

    def _admit(self, draft: _Draft, request: Request) -> None:
        """Gives the head of the queue a seat and its first chunk, or closes admission."""
        scored = request.sampling.prompt_logprobs is not None and not request.output
        hit = [] if scored and not request.sample else self.kv.match(request)
        pending = len(request.tokens) - len(hit) * self.kv.block_size
        num_tokens = self._chunk_size(pending, draft)
        if not num_tokens:
            draft.closed = Unused.INDIVISIBLE
            return
        if num_tokens < pending and draft.partials >= self._rules.max_partial_prefills:
            draft.closed = Unused.POLICY
            return
        if not self.kv.try_admit(
            request,
            self._seats[-1],
            hit,
            reserve_tokens=self._reserve(request, len(request.tokens) - pending + num_tokens),
            spare=self._spare if self.running else 0,
        ):
            draft.closed = Unused.KV
            return
        self._seats.pop()
        queue = self._queue(request)
        request.status = Status.RUNNING
        queue.left()
        self.running.append(request)
        draft.admitted.append(request)
        draft.partials += 1
        draft.longs += self._is_long(request)
        if request.num_preempted:
            draft.resume_hit_tokens += request.num_computed
        else:
            request.num_cached = request.num_computed
            draft.hit_tokens += request.num_computed
        if self._grow(draft, request, num_tokens):
            self._give(draft, request, num_tokens)

    def _give(self, draft: _Draft, request: Request, num_tokens: int) -> None:
        draft.prefills.append((request, num_tokens))
        draft.left -= num_tokens
        if num_tokens == request.num_pending:
            draft.partials -= 1
            draft.longs -= self._is_long(request)

    def _chunk_size(self, pending: int, draft: _Draft) -> int:
        """Tokens of `pending` that run in this step; 0: a whole chunk does not fit."""
        if not self._equal_chunks:
            return min(pending, draft.left)
        size = policy.canonical_chunk(pending, self._rules.chunk_size, draft.left)
        draft.indivisible |= not size
        return size if self._deterministic else size or draft.left

    # -- KV and seats ----------------------------------------------------------------------------

    def _reserve(self, request: Request, end: int) -> int:
        """Tokens whose blocks admission promises; `end` is that of the first chunk."""
        if self._rules.reserve_full_prompt or request.num_preempted or self._deterministic:
            return policy.reserve_tokens(request, self.kv.block_size, self._deterministic)
        return end

    def _grow(self, draft: _Draft, request: Request, num_tokens: int) -> bool:
        """Room for `num_tokens` more; preempts until there is.  False: `request` had to go."""
        while not self.kv.try_grow(request, num_tokens):
            beyond = [
                r
                for r in self.running
                if r.status is Status.RUNNING and (r is request or len(r.blocks) > r.reserved)
            ]
            victim = policy.victim(beyond)
            self._preempt(draft, victim)
            if victim is request:
                return False
        return True

    def _preempt(self, draft: _Draft, request: Request) -> None:
        """Takes seat and blocks away; the tokens stay, and are computed again later.

        `running` keeps it until the end of `schedule`, which may be going through the list.
        """
        planned = [chunk for chunk in draft.decodes if chunk.request is request]
        draft.decodes[:] = [chunk for chunk in draft.decodes if chunk.request is not request]
        draft.left += len(planned) + sum(n for r, n in draft.prefills if r is request)
        draft.prefills = [(r, n) for r, n in draft.prefills if r is not request]
        draft.admitted = [r for r in draft.admitted if r is not request]
        self._leave_seat(request)
        had_kv = request.num_computed - len(planned)
        request.recompute_until = max(request.recompute_until, had_kv)
        request.status, request.num_computed, request.num_in_flight = Status.WAITING, 0, 0
        request.epoch += 1
        request.num_preempted += 1
        draft.preempted.append(request)

    def _after_preemptions(self, draft: _Draft) -> None:
        self.running = [r for r in self.running if r.status is Status.RUNNING]
        for request in draft.preempted:
            self._enqueue(request)
        self._admit_from = self._step + self._backoff
        self._backoff = min(2 * self._backoff, MAX_BACKOFF)

    def _leave_seat(self, request: Request) -> None:
        self.kv.release(request)
        self._seats.append(request.seat)
        request.seat = -1

    def _publish(self, request: Request, start: int, num_tokens: int) -> None:
        """Deterministic: only whole canonical chunks of prompts, whose bits are always the same."""
        end = start + num_tokens
        if not self._deterministic or (
            num_tokens == self._rules.chunk_size and end <= request.num_prompt
        ):
            self.kv.publish(request, start, end)

    # -- queue and order -------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        request.last_step = self._step
        self._queue(request).push(request)

    def _queue(self, request: Request) -> WaitingQueue:
        return self._long if self._is_long(request) else self._short

    def _is_long(self, request: Request) -> bool:
        return len(request.tokens) > self._rules.long_prefill_threshold

    def _order(self, request: Request) -> tuple[int, ...]:
        rules = self._rules
        return policy.order_key(rules.policy, request, self._step, rules.aging_steps)

    # -- the plan --------------------------------------------------------------------------------

    def _seal(self, draft: _Draft) -> Plan:
        """Snaps the step to a bucket, moves the progress of its prefills on, gives the reason."""
        unused = self._unused(draft)
        used = len(draft.decodes) + sum(n for _, n in draft.prefills)
        if draft.prefills and not self._equal_chunks:
            request, num_tokens = draft.prefills[-1]
            cut = snap.tokens_to_cut(used, num_tokens, len(draft.decodes), self.costs)
            if cut:
                draft.prefills[-1] = (request, num_tokens - cut)
                used, unused = used - cut, Unused.SNAP
        chunks, recomputed = draft.decodes, 0
        decode_tokens = len(chunks)
        for request, num_tokens in sorted(draft.prefills, key=lambda p: p[1] > 1):
            start = request.num_computed
            end = start + num_tokens
            samples = end == len(request.tokens) and end < request.max_total
            chunks.append(Chunk(request, start, num_tokens, request.epoch, samples))
            recomputed += max(0, min(end, request.recompute_until) - start)
            request.num_computed, request.num_in_flight = end, int(samples)
            request.last_step = self._step
        singles = decode_tokens + sum(n == 1 for _, n in draft.prefills)
        return Plan(
            chunks=chunks,
            num_singles=singles,
            num_tokens=used,
            bucket=self.costs.bucket(used) if used else 0,
            decode_tokens=decode_tokens,
            recomputed_tokens=recomputed,
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            hit_tokens=draft.hit_tokens,
            resume_hit_tokens=draft.resume_hit_tokens,
            unused=unused,
        )

    def _unused(self, draft: _Draft) -> Unused | None:
        if draft.left <= 0:
            return None
        if draft.preempted:
            return Unused.KV
        if draft.indivisible:
            return Unused.INDIVISIBLE
        if draft.closed is not None:
            return draft.closed
        planned = len(draft.decodes) + len(draft.prefills)
        return Unused.NOT_READY if planned < len(self.running) else Unused.NO_WORK
