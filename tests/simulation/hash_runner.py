"""A runner whose answers are hashes of the context it sees, and the same answers worked out alone.

The KV of a token is a hash of everything it sees (`context`), read through the block table of each
group of layers; the next token is a hash of all KV that its row sees and of its sampling options.
So a wrong block, position, seat, option or token shows as a wrong token.  Reads see the state
before the step, writes come after.
"""

import numpy as np

from jaxserve.batch.step import Batch, Logprobs, SampleInputs, StepResult
from jaxserve.kv.groups import FULL, Windows
from jaxserve.request import Request
from tests.simulation.context import MASK, Context, mix, mix_array


def draw(context: int, options: tuple, position: int, vocab: int, suppressed: frozenset) -> int:
    token = mix(mix(context, hash(options) & MASK), position) % vocab
    while token in suppressed:
        token = (token + 1) % vocab
    return token


def is_bad(context: int, one_in: int) -> bool:
    return bool(one_in) and mix(context, 77) % one_in == 0


def score(context: int, token: int) -> tuple[float, int]:
    value = mix(context, token + 5)
    return float(value % 100_000), value % 89 + 1


def top(context: int) -> list[int]:
    return [mix(context, 1000 + i) % 50 for i in range(20)]


def counts_hash(tokens: list[int], num_prompt: int) -> int:
    """Of what a penalty sees: which tokens the prompt has, how often each was put out."""
    total = sum(mix(token, 1) for token in set(tokens[:num_prompt]))
    return (total + sum(mix(token, 2) for token in tokens[num_prompt:])) & MASK


class HashRunner:
    """`bad_one_in`: about one sampled row in so many has no finite logits.

    Set `fail_dispatch` or `fail_result` and the next such call raises and scribbles over all KV.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        seats: int,
        vocab: int,
        bad_one_in: int = 0,
        windows: Windows = FULL,
    ) -> None:
        num_slots = num_blocks * block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv = mix_array(np.arange(num_slots, dtype=np.uint64), np.full(1, 4321, np.uint64))
        self.last_tokens = np.full(seats, -1)
        self.counts: list[tuple[list[int], int] | None] = [None] * seats
        self.windows = windows
        self.seats = seats
        self.vocab = vocab
        self.bad_one_in = bad_one_in
        self.fail_dispatch = self.fail_result = False

    def dispatch(self, batch: Batch) -> StepResult:
        if self.fail_dispatch:
            self.fail_dispatch = False
            self._break("dispatch failed")
        self._check_arrays(batch)
        for seat, tokens, num_prompt in batch.resets:
            self.counts[seat] = (tokens.tolist(), num_prompt)
        contexts = self._forward(batch)
        scores = tuple(
            self._logprobs([contexts[i] for i in s.token_index if i < batch.num_tokens], s.targets)
            for s in batch.scores
        )
        if batch.samples is None:
            return StepResult(np.zeros(0, np.int32), np.zeros(0, bool), None, scores, 0.001)
        rows = [contexts[i] for i in batch.samples.token_index[: batch.num_samples]]
        tokens = self._sample(batch, batch.samples, rows)
        bad = np.zeros(len(tokens), bool)
        bad[: len(rows)] = [is_bad(context, self.bad_one_in) for context in rows]
        logprobs = self._logprobs(rows, tokens) if batch.logprobs else None
        return StepResult(tokens, bad, logprobs, scores, 0.001)

    def result(self, handle: StepResult) -> StepResult:
        if self.fail_result:
            self.fail_result = False
            self._break("result failed")
        return handle

    def scribble(self, blocks: list[int]) -> None:
        """Over blocks that are nobody's and can be found by nobody: whoever reads them is wrong."""
        kv = self.kv.reshape(self.num_blocks, self.block_size)
        kv[blocks] += np.uint64(len(blocks))

    def _break(self, why: str) -> None:
        self.kv = mix_array(self.kv, np.full(1, 999, np.uint64))
        self.last_tokens[:] = -1
        self.counts = [None] * self.seats
        raise RuntimeError(why)

    def _check_arrays(self, batch: Batch) -> None:
        """B15, B17, B18, B27: real slots once, padding past the end, nothing writable, negative or
        out of range."""
        x, num_slots = batch.inputs, len(self.kv)
        n = batch.num_tokens
        for array in (
            batch.packed,
            *x,
            *(batch.samples or ()),
            *(a for s in batch.scores for a in s),
        ):
            assert not array.flags.writeable
        assert (batch.packed >= 0).all()
        slots = x.slots.reshape(len(self.windows), -1)
        real = slots[:, :n]
        assert len(np.unique(real)) == real.size and (real < num_slots).all()
        assert (slots[:, n:] == num_slots).all() and (x.token_seats[n:] == self.seats).all()
        assert (x.block_tables < self.num_blocks).all()
        assert x.query_starts[-1] == n and (np.diff(x.query_starts) >= 0).all()
        singles = x.num_decodes[0]
        assert (np.diff(x.query_starts)[:singles] == 1).all()
        assert not (np.diff(x.query_starts)[singles:] == 1).any()
        assert (x.tokens < self.vocab).all()

    def _forward(self, batch: Batch) -> list[int]:
        """The context after every token of the step, int[num_tokens]; writes the KV."""
        x = batch.inputs
        slots = x.slots.reshape(len(self.windows), -1)
        contexts: list[int] = []
        writes: list[list[int]] = []
        starts = x.query_starts.tolist()
        for row in range(len(x.kv_lens)):
            begin, end = starts[row], starts[row + 1]
            if begin == end:
                continue
            first = int(x.kv_lens[row]) - (end - begin)
            assert (x.positions[begin:end] == np.arange(first, x.kv_lens[row])).all()
            context = self._read(batch, row, first, slots[:, begin:end])
            for i in range(begin, end):
                seat = x.token_seats[i]
                token = int(self.last_tokens[seat] if seat < self.seats else x.tokens[i])
                assert token >= 0, "a seat's token was used before it had one"
                writes.append(context.advance(token, first + i - begin))
                contexts.append(context.value)
        self.kv[slots[:, : len(writes)]] = np.array(writes, np.uint64).T
        return contexts

    def _read(self, batch: Batch, row: int, first: int, slots: np.ndarray) -> Context:
        """What the token at position `first` of a row sees; `slots`: where the row writes."""
        x, block_size = batch.inputs, self.block_size
        context = Context(self.windows)
        length = int(x.kv_lens[row])
        tables = x.block_tables.reshape(len(self.windows), len(x.kv_lens), -1)
        for group, (table, window) in enumerate(zip(tables[:, row], self.windows, strict=True)):
            low = 0 if window is None else max(0, first - window + 1)
            place = np.arange(low, length)
            where = table[place // block_size] * block_size + place % block_size
            assert (where[first - low :] == slots[group]).all(), "the write is not where it is read"
            before = slice(0, first - low)
            seen = mix_array(self.kv[where[before]], place[before].astype(np.uint64))
            context.read(group, seen.tolist() if window else [int(seen.sum(dtype=np.uint64))])
        return context

    def _sample(self, batch: Batch, s: SampleInputs, rows: list[int]) -> np.ndarray:
        tokens = np.zeros(len(s.seats), np.int32)
        assert (s.seats[len(rows) :] == self.seats).all()
        for row, context in enumerate(rows):
            seat = int(s.seats[row])
            options = row_options(s, row, self.vocab)
            if batch.sampler == "full" and options[1]:
                counted = self.counts[seat]
                assert counted is not None, "penalties without counts"
                options = (*options, counts_hash(*counted))
            suppressed = frozenset()
            if s.suppress_stops[row]:
                suppressed = frozenset(s.stop_ids[row][s.stop_ids[row] < self.vocab].tolist())
            position = int(s.position[row]) if batch.sampler != "greedy" and options[0] else 0
            tokens[row] = draw(context, options, position, self.vocab, suppressed)
            self.last_tokens[seat] = tokens[row]
            counted = self.counts[seat]
            if counted is not None and batch.sampler == "full":
                counted[0].append(int(tokens[row]))
        return tokens

    def _logprobs(self, contexts: list[int], targets: np.ndarray) -> Logprobs:
        size = len(targets)
        out = Logprobs(
            np.zeros(size, np.float32),
            np.zeros(size, np.int32),
            np.zeros((size, 20), np.int32),
            np.zeros((size, 20), np.float32),
        )
        for i, context in enumerate(contexts):
            out.chosen[i], out.rank[i] = score(context, int(targets[i]))
            out.top_ids[i] = top(context)
        return out


def row_options(s: SampleInputs, row: int, vocab: int) -> tuple:
    """What the sampler sees of a row, in the form of `request_options`."""
    random = ()
    if s.temperature[row] > 0:
        names = (s.temperature, s.top_p, s.min_p)
        random = (
            *(float(a[row]) for a in names),
            int(s.top_k[row]),
            int(s.seed[row, 0]),
            int(s.seed[row, 1]),
            int(s.sample[row]),
        )
    penalties = tuple(float(a[row]) for a in (s.presence, s.frequency, s.repetition))
    used = s.bias_ids[row] < vocab
    pairs = zip(s.bias_ids[row][used].tolist(), s.bias[row][used].tolist(), strict=True)
    bias = tuple(sorted(pairs))
    return (random, () if penalties == (0.0, 0.0, 1.0) else penalties, bias)


def request_options(request: Request, vocab: int) -> tuple:
    """The same from the request, by other code."""
    asked = request.sampling
    random = ()
    if not asked.is_greedy:
        random = (
            *(float(np.float32(v)) for v in (asked.temperature, asked.top_p, asked.min_p)),
            min(asked.top_k, vocab) if asked.top_k > 0 else vocab,
            request.seed % 2**32,
            request.seed // 2**32,
            request.sample,
        )
    values = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
    penalties = tuple(float(np.float32(v)) for v in values)
    bias = tuple(sorted((t, float(np.float32(v))) for t, v in asked.logit_bias.items()))
    return (random, () if penalties == (0.0, 0.0, 1.0) else penalties, bias)


class Alone:
    """What a request must get, worked out without engine, blocks or steps."""

    def __init__(
        self, request: Request, vocab: int, bad_one_in: int, windows: Windows = FULL
    ) -> None:
        asked = request.sampling
        options = request_options(request, vocab)
        tokens = request.tokens[: request.num_prompt]
        self.prompt_scores: list[tuple[float, int] | None] = [None]
        self.scores: list[tuple[float, int]] = []
        self.reason = "length"
        seen = Context(windows)
        for position, token in enumerate(tokens):
            if position:
                self.prompt_scores.append(score(seen.value, token))
            seen.advance(token, position)
        while len(tokens) < request.max_total:
            context = seen.value
            if is_bad(context, bad_one_in):
                self.reason = "error"
                break
            row = options
            if options[1]:
                row = (*options, counts_hash(tokens, request.num_prompt))
            done = len(tokens) - request.num_prompt
            suppressed = request.stop_ids if done < asked.min_tokens else frozenset()
            position = len(tokens) if options[0] else 0
            token = draw(context, row, position, vocab, suppressed)
            self.scores.append(score(context, token))
            tokens.append(token)
            if token in request.stop_ids:
                self.reason = "stop"
                break
            seen.advance(token, len(tokens) - 1)
        self.output = tokens[request.num_prompt :]
