"""Sampling options of the rows of a step: one table by seat, gathered for the rows that sample."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.batch.logprobs import wants_scores
from jaxserve.batch.step import SampleInputs
from jaxserve.config import EngineConfig
from jaxserve.request import MAX_BIAS, MAX_EOS_IDS, MAX_STOP_IDS, SAMPLERS, Request

STOP_WIDTH = MAX_STOP_IDS + MAX_EOS_IDS  # A of SampleInputs


def neutral(rows: int, *, token_index: int, seats: int, vocab_size: int) -> SampleInputs:
    """R padding rows, fresh and writable; `token_index` T and `seats` are past the end."""
    return SampleInputs(
        token_index=np.full(rows, token_index, np.int32),
        seats=np.full(rows, seats, np.int32),
        temperature=np.zeros(rows, np.float32),
        top_k=np.full(rows, vocab_size, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        presence=np.zeros(rows, np.float32),
        frequency=np.zeros(rows, np.float32),
        repetition=np.ones(rows, np.float32),
        seed=np.zeros((rows, 2), np.uint32),
        sample=np.zeros(rows, np.int32),
        position=np.zeros(rows, np.int32),
        suppress_stops=np.zeros(rows, np.bool_),
        stop_ids=np.full((rows, STOP_WIDTH), vocab_size, np.int32),
        bias_ids=np.full((rows, MAX_BIAS), vocab_size, np.int32),
        bias=np.zeros((rows, MAX_BIAS), np.float32),
    )


class SeatTable:
    """The options of the request in every seat.  `config` is resolved; `vocab_size` V."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._seats = seats = config.scheduler.max_seqs
        self._vocab_size = vocab_size
        self._pinned = None
        if config.runner.deterministic:  # which program samples a row must not depend on others
            self._pinned = SAMPLERS[2 if config.sampling.penalties else int(config.sampling.random)]
        self._table = neutral(seats, token_index=0, seats=seats, vocab_size=vocab_size)
        self._level = np.zeros(seats, np.int8)  # index in SAMPLERS
        self._logprobs = np.zeros(seats, np.bool_)
        self._scores = np.zeros(seats, np.bool_)
        self._biased = np.zeros(seats, np.bool_)
        self._min_position = np.zeros(seats, np.int32)  # stops are suppressed below
        self._neutral: dict[int, SampleInputs] = {}  # by rows; read-only

    def sit(self, request: Request) -> None:
        """`request` has taken its seat."""
        asked, seat, table = request.sampling, request.seat, self._table
        vocab = self._vocab_size
        table.temperature[seat] = 0.0 if asked.is_greedy else asked.temperature
        table.top_k[seat] = min(asked.top_k, vocab) if asked.top_k > 0 else vocab
        table.top_p[seat] = asked.top_p
        table.min_p[seat] = asked.min_p
        table.presence[seat] = asked.presence_penalty
        table.frequency[seat] = asked.frequency_penalty
        table.repetition[seat] = asked.repetition_penalty
        table.seed[seat] = (request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF)
        table.sample[seat] = request.sample
        self._min_position[seat] = request.num_prompt + asked.min_tokens
        table.stop_ids[seat] = vocab
        table.stop_ids[seat, : len(request.stop_ids)] = sorted(request.stop_ids)
        if self._biased[seat] or asked.logit_bias:
            table.bias_ids[seat], table.bias[seat] = vocab, 0.0
            table.bias_ids[seat, : len(asked.logit_bias)] = list(asked.logit_bias)
            table.bias[seat, : len(asked.logit_bias)] = list(asked.logit_bias.values())
        self._biased[seat] = bool(asked.logit_bias)
        self._level[seat] = asked.sampler
        self._logprobs[seat] = asked.logprobs is not None
        self._scores[seat] = wants_scores(request)

    def any_scores(self, seats: NDArray[np.int32]) -> bool:
        """False when none of these seats' requests wants its prompt scored."""
        return _any_of(self._scores, seats)

    def sampler(self, seats: NDArray[np.int32]) -> str:
        """The sampling program for rows with these `seats`, at least one."""
        return self._pinned or SAMPLERS[int(self._level[seats].max())]

    def gather(
        self,
        seats: NDArray[np.int32],
        token_index: NDArray[np.int32],
        position: NDArray[np.int32],
        bucket: tuple[int, int],
    ) -> tuple[str, SampleInputs, bool]:
        """Sampler, inputs and "some row wants logprobs" for the rows with these `seats`.

        `bucket`: rows R and tokens T.  What the sampler does not read is shared and neutral.
        """
        rows, real = bucket[0], len(seats)
        sampler = self.sampler(seats)
        base = self._neutral_rows(rows)
        fresh: dict[str, NDArray[Any]] = {
            "token_index": _padded(token_index, rows, bucket[1]),
            "seats": _padded(seats, rows, self._seats),
        }
        if sampler != "greedy":
            fresh["position"] = _padded(position, rows, 0)
            names = _RANDOM if sampler == "random" else _FULL
            suppress = position < self._min_position[seats]
            if suppress.any():
                fresh["suppress_stops"] = np.zeros(rows, np.bool_)
                fresh["suppress_stops"][:real] = suppress
                names = (*names, "stop_ids")
            if _any_of(self._biased, seats):
                names = (*names, "bias_ids", "bias")
            for name in names:
                values = np.array(getattr(base, name))
                values[:real] = getattr(self._table, name)[seats]
                fresh[name] = values
        for values in fresh.values():
            values.flags.writeable = False
        return sampler, base._replace(**fresh), _any_of(self._logprobs, seats)

    def _neutral_rows(self, rows: int) -> SampleInputs:
        if rows not in self._neutral:
            base = neutral(rows, token_index=0, seats=self._seats, vocab_size=self._vocab_size)
            for values in base:
                values.flags.writeable = False
            self._neutral[rows] = base
        return self._neutral[rows]


_RANDOM = ("temperature", "top_k", "top_p", "min_p", "seed", "sample")
_FULL = (*_RANDOM, "presence", "frequency", "repetition")  # the wide ones only when used


def _any_of(flags: NDArray[np.bool_], seats: NDArray[np.int32]) -> bool:
    """Nearly always no seat at all has the flag, which is seen soonest."""
    return bool(flags.any() and flags[seats].any())


def _padded(values: NDArray[np.int32], rows: int, padding: int) -> NDArray[np.int32]:
    padded = np.full(rows, padding, np.int32)
    padded[: len(values)] = values
    return padded
