"""What the server counts while it runs: steps of the engine, and requests that came over HTTP.

Plain sums, added up as messages pass and read by whoever shows them (`exposition.py`, the log): a
step of 64 streams passes here a hundred times a second, and nobody may be looking.
"""

import bisect
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence

from jaxserve.metrics import StepRecord, Totals
from jaxserve.server.protocol import Add, Entry, Finish, Refused, Stepped, ToEngine

# Upper bounds, seconds.  The first three are vLLM's, finer below 10 ms where those of it begin.
TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.001, 0.0025, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25),
    *(0.5, 1.0, 2.5, 5.0),
)
TOKENS = tuple(2**power for power in range(18))
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)


class Histogram:
    """Counts by upper bound.  One thread adds."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; beyond the last one is a place too."""
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[int]:
        """Values up to each bound, and at last all of them."""
        total, found = 0, list[int]()
        for count in self._counts:
            total += count
            found.append(total)
        return found


def _of(bounds: Sequence[float]) -> Histogram:
    return dataclasses.field(default_factory=lambda: Histogram(bounds))


@dataclasses.dataclass(slots=True)
class BucketTotals:
    """Sums over the steps of one token bucket."""

    steps: int = 0
    padded_tokens: int = 0
    padding_s: float = 0.0
    device_s: float = 0.0


@dataclasses.dataclass(slots=True)
class Steps:
    """All steps, those for batches included."""

    totals: Totals = dataclasses.field(default_factory=Totals)
    by_bucket: dict[int, BucketTotals] = dataclasses.field(default_factory=dict[int, BucketTotals])
    kinds: Counter[str] = dataclasses.field(default_factory=Counter[str])
    mixed_decode_tokens: int = 0  # decodes that had a prefill beside them
    unused_tokens: Counter[str] = dataclasses.field(default_factory=Counter[str])
    device_s: Histogram = _of(STEP)
    tokens: Histogram = _of(TOKENS)
    prefill_tokens: Histogram = _of(TOKENS)  # of the steps that have some

    def add(self, record: StepRecord, budget: int) -> None:
        """`budget`: tokens that a step may have."""
        self.totals.add(record)
        bucket = self.by_bucket.get(record.bucket)
        if bucket is None:
            bucket = self.by_bucket[record.bucket] = BucketTotals()
        bucket.steps += 1
        bucket.padded_tokens += record.padded_tokens
        bucket.padding_s += record.padding_s
        bucket.device_s += record.device_s
        prefill = record.prefill_tokens + record.recomputed_tokens
        if prefill:
            self.prefill_tokens.add(prefill)
        if prefill and record.decode_tokens:
            self.kinds["mixed"] += 1
            self.mixed_decode_tokens += record.decode_tokens
        else:
            self.kinds["prefill" if prefill else "decode"] += 1
        tokens = prefill + record.decode_tokens
        self.tokens.add(tokens)
        self.device_s.add(record.device_s)
        if record.unused is not None:
            self.unused_tokens[record.unused] += budget - tokens


@dataclasses.dataclass(slots=True)
class Requests:
    """All samples that came over HTTP; latencies are those of the front, in seconds."""

    finished: Counter[str] = dataclasses.field(default_factory=Counter[str])  # by reason
    ttft: Histogram = _of(TTFT)
    between_tokens: Histogram = _of(BETWEEN_TOKENS)
    # Of those that ended by themselves.
    per_token: Histogram = _of(BETWEEN_TOKENS)  # means, the first token apart
    whole: Histogram = _of(WHOLE)
    decode: Histogram = _of(WHOLE)
    prompt_tokens: Histogram = _of(TOKENS)
    output_tokens: Histogram = _of(TOKENS)
    # As the engine saw them.
    prefill_wait: Histogram = _of(WHOLE)
    prefill_compute: Histogram = _of(WHOLE)
    prefill_steps: Histogram = _of(FEW)


@dataclasses.dataclass(slots=True)
class _Open:
    """A sample in flight; times are the clock's."""

    samples: int  # of its prompt
    prompt_tokens: int
    submitted: float
    first: float = 0.0  # token; 0: none yet
    last: float = 0.0
    tokens: int = 0


class Tally:
    """Hears every message between server and engine that is about requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = Steps()
        self.requests = Requests()
        self.http: Counter[tuple[str, int]] = Counter()  # answers by route and status
        self.budget = 0  # tokens that a step may have
        self._clock = clock
        self._open: dict[int, _Open] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def sent(self, message: ToEngine) -> None:
        """To the engine, for a request."""
        if isinstance(message, Add):
            now, tokens = self._clock(), len(message.prompt) // 4
            samples = message.sampling.n
            for number in range(message.number, message.number + samples):
                self._open[number] = _Open(samples, tokens, now)
        elif isinstance(message, Finish):
            for number in message.numbers:
                self._end(number, message.reason)

    def stepped(self, message: Stepped) -> None:
        """What a step brought."""
        for record in message.records:
            self.steps.add(record, self.budget)
        now = self._clock()
        for entry in message.entries:
            request = self._open.get(entry.number)
            if request is not None:  # a line of a batch otherwise, or it has ended here
                self._advance(request, entry, now)

    def refused(self, message: Refused) -> None:
        """The engine did not take a prompt; all its samples have failed."""
        first = self._open.get(message.number)
        if first is not None:
            for number in range(message.number, message.number + first.samples):
                self._end(number, "error")

    def lost(self) -> None:
        """Nothing in flight will ever get a result."""
        for number in list(self._open):
            self._end(number, "error")

    def _advance(self, request: _Open, entry: Entry, now: float) -> None:
        seen = self.requests
        if entry.tokens:
            if request.tokens:
                seen.between_tokens.add(now - request.last)
            else:
                request.first = now
                seen.ttft.add(now - request.submitted)
            request.last = now
            request.tokens += len(entry.tokens)
        if entry.prefill is not None:
            seen.prefill_wait.add(entry.prefill.wait_s)
            seen.prefill_compute.add(entry.prefill.compute_s)
            seen.prefill_steps.add(entry.prefill.steps)
        if entry.finish_reason is not None:
            self._end(entry.number, entry.finish_reason)

    def _end(self, number: int, reason: str) -> None:
        request = self._open.pop(number, None)
        if request is None:
            return
        seen = self.requests
        seen.finished[reason] += 1
        if reason not in ("stop", "length"):
            return
        seen.whole.add(self._clock() - request.submitted)
        seen.prompt_tokens.add(request.prompt_tokens)
        seen.output_tokens.add(request.tokens)
        if request.tokens:
            seen.decode.add(request.last - request.first)
        if request.tokens > 1:
            seen.per_token.add((request.last - request.first) / (request.tokens - 1))
