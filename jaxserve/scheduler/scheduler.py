"""Decides which tokens of which requests run in the next step, and records what came back.

There is no prefill phase and no decode phase: a request has `num_computed` tokens and needs all the
tokens it has.  Decodes run first, then partial prefills and the head of the queue in policy order.
Nobody starves: at most `max_seqs <= token_budget` requests run, so whenever one of them is in its
prefill at least one token is left for it, and policy order is subject to aging.
"""

import collections
import logging
import math

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.costs import OnlineCosts, no_step
from jaxserve.kv.manager import KVManager
from jaxserve.request import SAMPLERS, Output, Request, SeatProgress, Status
from jaxserve.scheduler import policy, snap
from jaxserve.scheduler.decoding import Decoding
from jaxserve.scheduler.pacing import FRONT, Pacing
from jaxserve.scheduler.plan import Bools, Chunk, Decodes, Draft, Ints, Plan, Unused
from jaxserve.scheduler.time_budget import Price, StepTime
from jaxserve.scheduler.waiting import WaitingQueue

MAX_BACKOFF = 32  # steps without admission after a preemption, at most
NOT_FINITE = "the model's logits were not finite"  # why a request failed alone
FEW_PROMPTS, FEW_BUDGETS = 4, 4  # behind more, or more steps' tokens, the whole budget is used
EFFICIENT = 0.6  # of the tokens a second of the largest step, at least
REFRESH_COSTS = 256  # steps between two looks at the corrected costs

_log = logging.getLogger(__name__)


class Scheduler:
    """`config` is resolved.  Invariant between calls: `running` is exactly the requests that have a
    seat, oldest admission first, and `kv` agrees with their blocks."""

    def __init__(self, config: EngineConfig, kv: KVManager) -> None:
        rules = config.scheduler
        self.kv = kv
        self.running: dict[Request, None] = {}
        self.costs = snap.padded_tokens(config.buckets.tokens)
        self._sizes, self._row_sizes = config.buckets.tokens, config.buckets.rows
        self._online: OnlineCosts | None = None
        self._rules = rules
        self._deterministic = config.runner.deterministic
        # Whole chunks of one size (SARATHI, or canonical borders) instead of whatever fits.
        self._equal_chunks = rules.mode == "fixed" or config.runner.deterministic
        self._one_prefill = rules.mode == "fixed"
        self._empty = no_step(kv.windows)
        self._pacing = Pacing(config, self._empty) if rules.mode == "time" else None
        by_deadline = rules.mode == "time" and rules.policy == "fcfs"
        dynamic = self._pacing is None and not self._equal_chunks
        self._stall_limit = rules.stall_limit if dynamic else 0.0
        self._policy = "deadline" if by_deadline else rules.policy
        self._spare = math.ceil(rules.watermark * kv.num_blocks)
        self._short = WaitingQueue(self._policy, rules.aging_steps)
        self._long = WaitingQueue(self._policy, rules.aging_steps)
        self._seats = list(range(rules.max_seqs - 1, -1, -1))
        self._progress = SeatProgress(rules.max_seqs)
        self._decoding = Decoding(self._progress)
        self._prefilling: dict[Request, None] = {}  # those of `running` that do not decode
        self._step = 0
        self._backoff = 1  # steps without admission after the next preemption
        self._admit_from = 0  # first step that may admit again

    @property
    def num_waiting(self) -> int:
        return len(self._short) + len(self._long)

    def set_costs(self, costs: OnlineCosts) -> None:
        """Seconds of steps from here on, in place of padded tokens."""
        self._online = costs
        self.costs = snap.measured(self._sizes, costs.programs(self._sizes))

    def add(self, request: Request) -> None:
        """Queues a new request; what can never fit has been refused before."""
        self._enqueue(request)

    def schedule(self, begin: float = 0.0) -> Plan:
        """The next step; the requests' progress counts it as done from here on.  `begin`: when the
        device is expected to begin it, by the clock of the requests' arrival."""
        self._step += 1
        if self._online is not None and self._step % REFRESH_COSTS == 0:
            self.set_costs(self._online)
        draft = Draft(self._rules.token_budget, prefills=[], admitted=[], preempted=[])
        self._take_decodes(draft)
        prefills = [r for r in self._prefilling if r.num_pending]
        # Equal chunks, and prompts with deadlines, go in one order whatever their length.
        dated = self._pacing is not None and any(r.anchor < math.inf for r in prefills)
        longs = [r for r in prefills if not (self._equal_chunks or dated) and self._is_long(r)]
        shorts = [r for r in prefills if r not in longs]
        self._keep_short(draft, prefills)
        draft.partials, draft.longs = len(prefills), sum(map(self._is_long, prefills))
        kept = policy.long_share(
            draft.left, sum(r.num_pending for r in longs), bool(shorts or len(self._short))
        )
        draft.left -= kept
        if self._pacing is not None:
            self._pace(draft, begin, prefills, self._pacing)
        self._take_prefills(draft, shorts, admit=True)
        draft.left += kept
        before = draft.longs
        self._take_prefills(draft, longs, admit=False)
        if draft.longs < before and draft.closed is Unused.POLICY:
            draft.closed = None  # a long prompt ends here: the next begins in what it leaves
            self._take_prefills(draft, [], admit=True)
        if draft.preempted:
            self._after_preemptions(draft)
        return self._seal(draft, begin)

    def update(self, plan: Plan, tokens: Ints, bad: Bools) -> list[Output]:
        """Records a step that has returned: i32 and bool of one entry a row that samples.

        `bad`: the row's logits were not finite, which ends its request alone.  Results for requests
        that were preempted or ended since the step was planned are dropped.
        """
        count = plan.decode_tokens
        outputs = self._land_decodes(plan.decodes, tokens[:count], bad[:count])
        self._land_chunks(plan.chunks, tokens[count:], bad[count:], outputs)
        return outputs

    def _land_decodes(self, decodes: Decodes, tokens: Ints, bad: Bools) -> list[Output]:
        held = self._decoding.landed(decodes)
        requests, texts = decodes.requests, decodes.tokens
        starts, limits = decodes.starts, decodes.limits
        failed: list[Request] = []
        if held is not None or bad.any():
            held = np.ones(len(requests), np.bool_) if held is None else held
            good = held & ~bad
            failed = [requests[i] for i in (held & bad).nonzero()[0].tolist()]
            kept = good.nonzero()[0].tolist()
            requests, texts = [requests[i] for i in kept], [texts[i] for i in kept]
            starts, limits, tokens = starts[good], limits[good], tokens[good]
        ids: list[int] = tokens.tolist()
        collections.deque(map(list[int].append, texts, ids), maxlen=0)  # a loop in C
        outputs = list(map(Output, requests, zip(ids, strict=True)))
        stopped: list[int] = []
        if not decodes.stop_ids.isdisjoint(ids):
            stopped = [row for row, r in enumerate(requests) if ids[row] in r.stop_ids]
        computed, size = starts + 1, self.kv.block_size
        filled: Bools = computed // size * size == computed  # a rest takes numpy longer
        for row in filled.nonzero()[0].tolist():
            self._landed(requests[row], int(starts[row]), 1)
        at_limit = (computed + 1 >= limits).nonzero()[0].tolist()
        ends = dict.fromkeys(at_limit, "length") | dict.fromkeys(stopped, "stop")
        for row, reason in ends.items():
            self.finish(requests[row], reason)
            outputs[row].finish_reason = reason
        outputs.extend(map(self._fail, failed))
        return outputs

    def _land_chunks(
        self, chunks: list[Chunk], tokens: Ints, bad: Bools, outputs: list[Output]
    ) -> None:
        row = -1
        for request, start, num_tokens, epoch, samples in chunks:
            row += samples
            if request.epoch != epoch:
                continue
            self._landed(request, start, num_tokens)
            if not samples:
                if start + num_tokens == request.max_total:  # only scored
                    self.finish(request, "length")
                    outputs.append(Output(request, (), finish_reason="length"))
                continue
            self._progress.in_flight[request.seat] -= 1
            if bad[row]:
                outputs.append(self._fail(request))
                continue
            token = int(tokens[row])
            request.tokens.append(token)
            if token in request.stop_ids:
                self.finish(request, "stop")
            elif len(request.tokens) >= request.max_total:
                self.finish(request, "length")
            outputs.append(Output(request, (token,), finish_reason=request.finish_reason))

    def _fail(self, request: Request) -> Output:
        self.finish(request, "error", NOT_FINITE)
        return Output(request, (), finish_reason="error")

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request and frees all it holds; the only place that does.  Idempotent."""
        if request.status is Status.FINISHED:
            return
        was_running = request.status is Status.RUNNING
        queue = self._queue(request)
        request.status, request.finish_reason, request.error = Status.FINISHED, reason, error
        request.epoch += 1
        if was_running:
            self._leave_seat(request)
            self._backoff = max(1, self._backoff // 2)
            self._admit_from = 0
        elif request.last_step >= 0:
            queue.left()

    # -- decodes ---------------------------------------------------------------------------------

    def _take_decodes(self, draft: Draft) -> None:
        """Gives every decoding request its token, after making room where it has none."""
        for request in self._decoding.due():
            if request.status is Status.RUNNING and self._grow(draft, request, 1):
                self._decoding.make_room(request, request.num_blocks * self.kv.block_size)
        draft.decodes = self._decoding.plan()
        draft.left -= len(draft.decodes.requests)

    def _pace(self, draft: Draft, begin: float, prefills: list[Request], pacing: Pacing) -> None:
        """Mode time: how much fits in the step, and which decodes wait."""
        if self._online is None:
            if self._step == 1:
                _log.warning("scheduler.mode=time has no costs: steps take the whole token budget")
            return
        free = min(len(self._seats), FRONT)
        waiting = [*self._short.front(free), *self._long.front(free)]
        prompts = sorted(prefills + waiting, key=self._order)
        draft.time, draft.held = pacing.decide(begin, draft.decodes, prompts, self._online)
        if draft.held is not None:
            draft.left += len(draft.decodes.requests)
            draft.decodes = self._decoding.plan(draft.held)
            draft.left -= len(draft.decodes.requests)

    def _keep_short(self, draft: Draft, prefills: list[Request]) -> None:
        """While prompts are few, their chunks do not hold up the decodes for longer than it takes
        to be efficient; behind a queue of many, the whole budget serves everybody best."""
        decodes = len(draft.decodes.requests)
        few = 0 < len(prefills) + self.num_waiting <= FEW_PROMPTS
        if few and self._stall_limit and decodes and self._online is not None:
            prompts = [*prefills, *self._short.front(FEW_PROMPTS), *self._long.front(FEW_PROMPTS)]
            most = FEW_BUDGETS * self._rules.token_budget
            if len(prompts) > 1 and sum(request.num_pending for request in prompts) > most:
                return
            predict, rows = self._online.predict, self._row_sizes
            price = Price(predict, self._sizes, rows, SAMPLERS[0], self._empty)
            load = self._empty.with_singles(draft.decodes.starts + 1)
            limit = self._stall_limit * price.seconds(load, decodes)
            start = prefills[0].num_computed if prefills else 0
            least = price.efficient(load, start, EFFICIENT)
            draft.time = StepTime(price, load, max(limit, least))

    # -- prefills --------------------------------------------------------------------------------

    def _take_prefills(self, draft: Draft, partial: list[Request], admit: bool) -> None:
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

    def _continue(self, draft: Draft, request: Request) -> None:
        if request.status is not Status.RUNNING:
            return
        num_tokens = self._chunk_size(request, request.num_computed, draft)
        if num_tokens and self._grow(draft, request, num_tokens):
            self._give(draft, request, num_tokens)

    def _head(self, draft: Draft) -> Request | None:
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

    def _admit(self, draft: Draft, request: Request) -> None:
        """Gives the head of the queue a seat and its first chunk, or closes admission."""
        scored = request.sampling.prompt_logprobs is not None and not request.output
        hit = self.kv.no_hit if scored and not request.sample else self.kv.match(request)
        start = hit.num_blocks * self.kv.block_size
        pending = len(request.tokens) - start
        num_tokens = self._chunk_size(request, start, draft)
        if not num_tokens:
            draft.closed = draft.closed or Unused.INDIVISIBLE
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
        request.seats = self._progress
        self._progress.computed[request.seat] = hit.num_blocks * self.kv.block_size
        self._progress.in_flight[request.seat] = 0
        self.running[request] = self._prefilling[request] = None
        draft.admitted.append(request)
        if self._pacing is not None:
            self._pacing.sit(request)
        draft.partials += 1
        draft.longs += self._is_long(request)
        if request.num_preempted:
            draft.resume_hit_tokens += request.num_computed
        else:
            request.num_cached = request.num_computed
            draft.hit_tokens += request.num_computed
        if self._grow(draft, request, num_tokens):
            self._give(draft, request, num_tokens)

    def _give(self, draft: Draft, request: Request, num_tokens: int) -> None:
        draft.prefills.append((request, num_tokens))
        draft.left -= num_tokens
        if draft.time is not None:
            whole = num_tokens == request.num_pending
            draft.time.add(request.num_computed, num_tokens, whole)
        if num_tokens == request.num_pending:
            draft.partials -= 1
            draft.longs -= self._is_long(request)

    def _chunk_size(self, request: Request, start: int, draft: Draft) -> int:
        """Tokens of `request` from `start` that run in this step; 0: a whole chunk does not fit, or
        the time is used up."""
        pending = request.num_tokens - start
        if not self._equal_chunks:
            size = min(pending, draft.left)
            return size if draft.time is None else self._in_time(request, start, size, draft)
        size = policy.canonical_chunk(pending, self._rules.chunk_size, draft.left)
        draft.indivisible |= not size
        return size if self._deterministic else size or draft.left

    def _in_time(self, request: Request, start: int, size: int, draft: Draft) -> int:
        """What of `size` fits.  In mode time whoever has aged gets something whatever the time, in
        mode dynamic the first prompt of every step does."""
        assert draft.time is not None
        fits = draft.time.most(start, request.num_tokens - start, size)
        if self._pacing is None:
            must = not draft.prefills
        else:
            must = self._step - request.last_step >= self._rules.aging_steps
        if must and not fits:
            fits = draft.time.least(size)
        if fits < size:
            draft.closed = Unused.TIME_BUDGET
        return fits

    # -- KV and seats ----------------------------------------------------------------------------

    def _reserve(self, request: Request, end: int) -> int:
        """Tokens whose blocks admission promises; `end` is that of the first chunk."""
        if self._rules.reserve_full_prompt or request.num_preempted or self._deterministic:
            return policy.reserve_tokens(request, self.kv.block_size, self._deterministic)
        return end

    def _grow(self, draft: Draft, request: Request, num_tokens: int) -> bool:
        """Room for `num_tokens` more; preempts until there is.  False: `request` had to go."""
        while not self.kv.try_grow(request, num_tokens):
            beyond = [r for r in self.running if r is request or r.num_blocks > r.reserved]
            victim = policy.victim(beyond)
            self._preempt(draft, victim)
            if victim is request:
                return False
        return True

    def _preempt(self, draft: Draft, request: Request) -> None:
        """Takes seat and blocks away; the tokens stay, and are computed again later."""
        draft.prefills = [(r, n) for r, n in draft.prefills if r is not request]
        draft.admitted = [r for r in draft.admitted if r is not request]
        request.recompute_until = max(request.recompute_until, request.num_computed)
        self._leave_seat(request)
        request.status = Status.WAITING
        request.epoch += 1
        request.num_preempted += 1
        draft.preempted.append(request)

    def _after_preemptions(self, draft: Draft) -> None:
        for request in draft.preempted:
            self._enqueue(request)
        self._admit_from = self._step + self._backoff
        self._backoff = min(2 * self._backoff, MAX_BACKOFF)

    def _leave_seat(self, request: Request) -> None:
        self.kv.release(request)
        self._decoding.leave(request)
        self._prefilling.pop(request, None)
        del self.running[request]
        self._seats.append(request.seat)
        request.seat, request.seats = -1, None

    def _landed(self, request: Request, start: int, num_tokens: int) -> None:
        """Deterministic: only whole canonical chunks of prompts can be found in the prefix cache,
        whose bits are always the same."""
        end = start + num_tokens
        same = num_tokens == self._rules.chunk_size and end <= request.num_prompt
        self.kv.landed(request, start, end, publish=same or not self._deterministic)

    # -- queue and order -------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        request.last_step = self._step
        self._queue(request).push(request)

    def _queue(self, request: Request) -> WaitingQueue:
        return self._long if self._is_long(request) else self._short

    def _is_long(self, request: Request) -> bool:
        return len(request.tokens) > self._rules.long_prefill_threshold

    def _order(self, request: Request) -> tuple[float, ...]:
        rules = self._rules
        return policy.order_key(self._policy, request, self._step, rules.aging_steps)

    # -- the plan --------------------------------------------------------------------------------

    def _seal(self, draft: Draft, begin: float) -> Plan:
        """Snaps the step to a bucket, moves the progress of its prefills on, gives the reason."""
        # A preemption on behalf of a prefill takes its victim's decode out of the step.
        if draft.preempted:
            draft.decodes = self._decoding.plan(draft.held)
        if draft.held is not None and not draft.prefills and not draft.decodes.requests:
            draft.decodes = self._decoding.plan()  # what they waited for cannot run
        decodes = draft.decodes
        used = len(decodes.requests) + sum(n for _, n in draft.prefills)
        unused = self._unused(draft, used, len(decodes.requests))
        last_chunk = cut = 0
        if draft.prefills and not self._equal_chunks:
            request, last_chunk = draft.prefills[-1]
            cut = snap.tokens_to_cut(used, last_chunk, len(decodes.requests), self.costs)
            if cut:
                draft.prefills[-1] = (request, last_chunk - cut)
                used, unused = used - cut, Unused.SNAP
        self._decoding.advance(decodes)
        chunks = [
            self._start(request, num_tokens)
            for request, num_tokens in sorted(draft.prefills, key=lambda p: p[1] > 1)
        ]
        if self._pacing is not None and draft.time is not None:
            self._pacing.went(begin + draft.time.seconds, decodes, chunks)
        return Plan(
            decodes=decodes,
            chunks=chunks,
            num_singles=len(decodes.requests) + sum(chunk.num_tokens == 1 for chunk in chunks),
            num_tokens=used,
            bucket=self.costs.bucket(used) if used else 0,
            recomputed_tokens=sum(map(_recomputed, chunks)),
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            hit_tokens=draft.hit_tokens,
            resume_hit_tokens=draft.resume_hit_tokens,
            unused=unused,
            last_chunk=last_chunk,
            cut_tokens=cut,
        )

    def _start(self, request: Request, num_tokens: int) -> Chunk:
        """The next chunk of a prefill, counted as done; after its last one the request decodes."""
        start = request.num_computed
        end = start + num_tokens
        samples = end == len(request.tokens) and end < request.max_total
        self._progress.computed[request.seat] = end
        request.last_step = self._step
        if samples:
            self._progress.in_flight[request.seat] = 1
            del self._prefilling[request]
            self._decoding.join(request, request.num_blocks * self.kv.block_size)
        return Chunk(request, start, num_tokens, request.epoch, samples)

    def _unused(self, draft: Draft, used: int, decodes: int) -> Unused | None:
        if used >= self._rules.token_budget:
            return None
        if draft.preempted:
            return Unused.KV
        if draft.indivisible:
            return Unused.INDIVISIBLE
        if draft.closed is not None:
            return draft.closed
        planned = decodes + len(draft.prefills)
        return Unused.NOT_READY if planned < len(self.running) else Unused.NO_WORK


def _recomputed(chunk: Chunk) -> int:
    """Tokens of a chunk that had KV before a preemption."""
    end = min(chunk.start + chunk.num_tokens, chunk.request.recompute_until)
    return max(0, end - chunk.start)
