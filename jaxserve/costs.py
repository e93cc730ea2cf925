"""What a step costs: its shape, a model of its seconds, and a correction that follows the device.

    seconds = program[T] + sampling[kind][R] + a * rows + b * sum(contexts)
              + c * chunks + d * sum(query-key pairs of the chunks)
              + e * turns + f * turns * rows of their groups + g * filled-up pairs

T and R are buckets, so the first two are constants of a program; a row of one token reads its whole
context (b), and a chunk of n tokens after p computed ones has n * p + n * (n + 1) / 2 query-key
pairs (d).  The form is that of the batch time models of Vidur (arXiv 2405.05465, section 4.3) and
FairBatching (arXiv 2510.14392), with their linear term in tokens replaced by one constant a
compiled shape.  The last three are for a back end that works in whole pieces: rows in groups that
walk as far as their longest, whether all of them are there or not, chunks in tiles (`turns`,
`tile_pairs`); where it does not, they are fitted as 0.  A layer with a sliding window reads no
further than that, so contexts, pairs, turns and tiles are means over the layers, each with what its
layers see (`View`): beyond every window a step costs the same however long its contexts are.
`jaxserve.lab` measures and fits it; a warm-up alone gives the constants.
"""

import bisect
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
# How attention in plain XLA works (`pallas_kernels.ragged_paged_attention.xla`): rows of one token
# in full groups and what is left in small ones, positions in turns, chunks in tiles of queries with
# a turn of their own.
GROUPS, SPAN = (16, 4), 128
TILES = ((256, 256), (128, 128), (64, 128))
MAX_CORRECTION = math.log(4.0)  # of the logarithm of a prediction, either way
_OUTLIER = 0.25  # a surprise counts as at most this (in logarithms): a pause is not a trend
_COMMON_RATE, _BUCKET_RATE = 0.02, 0.05


class View(NamedTuple):
    """Layers that see equally far."""

    window: int | None  # positions that a query sees, itself included; None: all
    share: float  # of all layers


ALL = (View(None, 1.0),)


class StepShape(NamedTuple):
    """All that the time of a step depends on.  What attention reads is a mean over the layers."""

    bucket: int  # T: tokens of the backbone program
    tokens: int  # real ones
    rows: int  # R: rows of the sampling program; 0 when no row samples
    sampler: str  # none | greedy | random | full
    singles: int  # rows with one token
    single_context: float  # sum of the contexts they see, the token itself included
    chunks: int  # rows with more tokens
    chunk_pairs: float  # sum of their query-key pairs, see `pairs`
    single_turns: float = 0.0  # that their groups take, see `turns`
    single_turn_rows: float = 0.0  # and with how many rows, there or not
    tile_pairs: float = 0.0  # query-key pairs with tiles and turns filled up, see `tile_pairs`
    views: tuple[View, ...] = ALL  # of the model; their shares sum to 1

    @property
    def turn_rows(self) -> float:
        """`single_turn_rows`, but that no group has more rows than the program."""
        return min(self.single_turn_rows, self.single_turns * self.bucket)

    def with_singles(self, contexts: Ints) -> "StepShape":
        """With rows of one token more; `contexts` i32[rows]."""
        context, count, rows = self.single_context, self.single_turns, self.single_turn_rows
        for window, share in self.views:
            context += share * seen(contexts, window)
            walked = turns(contexts, window)
            count, rows = count + share * walked[0], rows + share * walked[1]
        return self._replace(
            tokens=self.tokens + len(contexts),
            singles=self.singles + len(contexts),
            single_context=context,
            single_turns=count,
            single_turn_rows=rows,
        )

    def with_chunk(self, start: int, num_tokens: int) -> "StepShape":
        """With a row of `num_tokens` tokens more, after `start` computed ones."""
        if num_tokens == 1:
            return self.with_singles(np.array([start + 1], np.int32))
        return self._replace(
            tokens=self.tokens + num_tokens,
            chunks=self.chunks + 1,
            chunk_pairs=self.chunk_pairs + self._mean(pairs, start, num_tokens),
            tile_pairs=self.tile_pairs + self._mean(tile_pairs, start, num_tokens),
        )

    def _mean(self, count: Callable[..., int], *of: Any) -> float:
        """`count(*of, window)` over the layers."""
        return sum(share * count(*of, window) for window, share in self.views)


NO_STEP = StepShape(0, 0, 0, "none", 0, 0, 0, 0)


def no_step(windows: Sequence[int | None]) -> StepShape:
    """`NO_STEP` of a model whose groups of layers, all of equally many, have these windows."""
    counts = Counter(windows)
    found = tuple(View(window, count / len(windows)) for window, count in counts.items())
    return NO_STEP._replace(views=found)


def seen(contexts: Ints, window: int | None = None) -> int:
    """Sum of what rows of one token see of their contexts."""
    return int(np.add.reduce(contexts if window is None else np.minimum(contexts, window)))


def turns(contexts: Ints, window: int | None = None) -> tuple[int, int]:
    """Turns of `SPAN` positions that rows of one token take, and those times the rows of a group.

    Full groups take the longest contexts, small ones what is left if it is at most half of a full
    one (`GROUPS`).  Every row of a group walks as far as its longest, from where the window of its
    shortest begins.  A program of fewer rows than a full group counts as if it had small ones.
    """
    longest, shortest, wide = _groups(len(contexts))
    ordered = np.sort(contexts)
    ends: list[int] = ordered[longest].tolist()  # of so few, Python's own integers are faster
    walked = [-(-end // SPAN) for end in ends]
    if window is not None:
        lows: list[int] = ordered[shortest].tolist()
        walked = [
            turn - max(low - window, 0) // SPAN for turn, low in zip(walked, lows, strict=True)
        ]
    full, small = GROUPS
    return sum(walked), full * sum(walked[:wide]) + small * sum(walked[wide:])


@functools.lru_cache(maxsize=4096)
def _groups(total: int) -> tuple[Ints, Ints, int]:
    """Of each group of `total` rows in ascending order the index of the longest and of the
    shortest, full groups first; how many are full."""
    full, small = GROUPS
    end = (total + full - 1 - full // 2) // full * full
    starts = [*range(0, end, full), *range(end, total, small)]
    longest = total - 1 - np.array(starts, np.int32)
    shortest = total - np.array([*starts[1:], total][: len(starts)], np.int32)
    return longest, shortest, len(range(0, end, full))


def tile_pairs(start: int, num_tokens: int, window: int | None = None) -> int:
    """Query-key pairs of a chunk in whole tiles and turns: (queries of a tile, positions a turn)
    are `TILES`.  A tile starts at the turn in which the window of its first query begins."""
    total, end, last = 0, start, start + num_tokens
    for size, span in TILES:
        spare = size - 1 if size == TILES[-1][0] else size // 4  # that one of them may have
        for _ in range(max(0, last - end + spare) // size):
            low = 0 if window is None else max(0, end + 1 - window) // span
            end += size
            total += size * (-(-min(end, last) // span) - low) * span
    return total


def pairs(start: int, num_tokens: int, window: int | None = None) -> int:
    """Query-key pairs of `num_tokens` tokens after `start` computed ones; a token after p others
    sees min(p + 1, window) positions."""
    whole = _up_to(start + num_tokens) - _up_to(start)
    if window is None:
        return whole
    return whole - _up_to(start + num_tokens - window) + _up_to(start - window)


def _up_to(count: int) -> int:
    """1 + 2 + ... + count; 0 for what is below."""
    return count * (count + 1) // 2 if count > 0 else 0


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds, all of them at least 0; see the formula above.  Sizes ascend.

    Raises ValueError for tables that do not fit each other.
    """

    tokens: tuple[int, ...]
    program: tuple[float, ...]  # of each token bucket, attention apart
    rows: tuple[int, ...] = ()
    # Sampler -> logits and sampling of each row bucket.
    sampling: Mapping[str, tuple[float, ...]] = dataclasses.field(
        default_factory=dict[str, tuple[float, ...]]
    )
    single: float = 0.0  # a row of one token
    single_context: float = 0.0  # a token of its context, in all layers
    chunk: float = 0.0  # a row of more tokens
    chunk_pair: float = 0.0
    turn: float = 0.0  # of a group of such rows
    turn_row: float = 0.0  # and for each that the group can hold
    tile_pair: float = 0.0  # a query-key pair of a filled-up tile
    host: float = 0.0  # host time of a step, beside the device's
    host_row: float = 0.0  # and of each of its rows

    def __post_init__(self) -> None:
        if not self.tokens or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(f"token buckets must ascend: {self.tokens}")
        if list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"row buckets must ascend: {self.rows}")
        lists = {"program": (self.tokens, self.program)}
        lists |= {f"sampling {kind}": (self.rows, row) for kind, row in self.sampling.items()}
        for name, (sizes, seconds) in lists.items():
            if len(sizes) != len(seconds):
                raise ValueError(f"{name} has {len(seconds)} costs for {len(sizes)} buckets")
        numbers = [x for _, seconds in lists.values() for x in seconds]
        numbers += [self.single, self.single_context, self.turn, self.turn_row]
        numbers += [self.chunk, self.chunk_pair, self.tile_pair, self.host, self.host_row]
        if not all(0.0 <= x < math.inf for x in numbers) or not all(x > 0 for x in self.program):
            raise ValueError("costs must be finite seconds, of programs above 0")

    def program_s(self, bucket: int) -> float:
        """Of a token bucket; of one that was not measured, on the line through its neighbours."""
        return _on_line(self.tokens, self.program, bucket)

    def sampling_s(self, sampler: str, rows: int) -> float:
        """Logits and sampling of a row bucket; "full" serves what has no program of its own."""
        if not rows or not self.rows:
            return 0.0
        known = self.sampling
        seconds = known.get(sampler) or known.get("full") or known.get("greedy")
        return _on_line(self.rows, seconds, rows) if seconds else 0.0

    def attention_s(self, shape: StepShape) -> float:
        """What depends on the requests of a step and not on its programs."""
        return (
            self.single * shape.singles
            + self.single_context * shape.single_context
            + self.chunk * shape.chunks
            + self.chunk_pair * shape.chunk_pairs
            + self.turn * shape.single_turns
            + self.turn_row * shape.turn_rows
            + self.tile_pair * shape.tile_pairs
        )

    def predict(self, shape: StepShape) -> float:
        """Seconds that the device is busy with a step."""
        return (
            self.program_s(shape.bucket)
            + self.sampling_s(shape.sampler, shape.rows)
            + self.attention_s(shape)
        )

    def host_s(self, rows: int) -> float:
        """Of a step of `rows` rows."""
        return self.host + self.host_row * rows


class OnlineCosts:
    """A model, and a factor a token bucket that follows what steps really took.

    The logarithm of a factor moves by a part of each surprise, cut at a quarter: half of it at the
    bucket's first step, since a model of one run each can be far off, then less and less, until a
    pause of the machine moves it hardly and a lasting change is learnt within a hundred steps.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._common = 0.0
        self._own: dict[int, float] = {}
        self._seen = Counter[int]()

    def factor(self, bucket: int) -> float:
        """What predictions of this bucket are multiplied by."""
        log = self._common + self._own.get(bucket, 0.0)
        return math.exp(max(-MAX_CORRECTION, min(MAX_CORRECTION, log)))

    def predict(self, shape: StepShape) -> float:
        """Seconds of a step, corrected."""
        return self.model.predict(shape) * self.factor(shape.bucket)

    def programs(self, sizes: tuple[int, ...]) -> dict[int, float]:
        """Corrected seconds of the program of each token bucket."""
        return {size: self.model.program_s(size) * self.factor(size) for size in sizes}

    def observe(self, shape: StepShape, predicted: float, seconds: float) -> None:
        """A step for which `predicted` was promised took `seconds`; nothing is learnt from 0."""
        if seconds <= 0.0 or predicted <= 0.0:
            return
        surprise = max(-_OUTLIER, min(_OUTLIER, math.log(seconds / predicted)))
        limit = MAX_CORRECTION
        self._common = max(-limit, min(limit, self._common + _COMMON_RATE * surprise))
        self._seen[shape.bucket] += 1
        rate = max(_BUCKET_RATE, 1.0 / (1 + self._seen[shape.bucket]))
        own = self._own.get(shape.bucket, 0.0) + rate * surprise
        self._own[shape.bucket] = max(-limit, min(limit, own))


def _on_line(sizes: tuple[int, ...], values: tuple[float, ...], size: int) -> float:
    """The value at `size`, on the line through the sizes around it; never below the first's share
    nor below 0."""
    at = bisect.bisect_left(sizes, size)
    if at < len(sizes) and sizes[at] == size:
        return values[at]
    if len(sizes) == 1 or at == 0:
        return values[0] * max(1.0, size / sizes[0])
    at = min(at, len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    slope = max(0.0, (values[at] - values[at - 1]) / (high - low))
    return values[at - 1] + slope * (size - low)
