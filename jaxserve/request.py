"""A request, what it asks for, and its progress through the engine."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import msgspec
import numpy as np

MAX_STOP_IDS = 16  # stop_token_ids a request may name beside the model's own EOS ids
MAX_EOS_IDS = 16  # end-of-sequence ids of a model
MAX_BIAS = 300  # logit_bias entries
MAX_LOGPROBS = 20
MAX_SAMPLES = 64  # n
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_BIAS_VALUE = 100.0  # logit_bias values lie in [-100, 100]
MAX_CLASS = 64  # characters of slo_class
MAX_INT = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
GREEDY_TEMPERATURE = 1e-4  # anything below is greedy
SAMPLERS = ("greedy", "random", "full")  # sampling programs; each serves what those before it serve


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, when it ends, and by when they are due.

    `seed=None` takes one from the engine's base seed and the request's number.  Logprobs describe
    the raw model distribution (log-softmax in float32), whatever the other options say.  `top_k`
    above the vocabulary means all of it; `top_p=0` keeps the most likely token only.  The first
    `min_tokens` tokens neither are stop ids nor end the text with a stop string.  Of `n` samples,
    sample 0 carries the prompt logprobs.  Raises ValueError for a value out of range.
    """

    max_tokens: int = 128  # 0: only score the prompt
    temperature: float = 1.0  # below 1e-4: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # 0 to 20 most likely tokens beside the sampled one
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None
    slo_class: str = ""  # of [slo.classes] in the settings: by when its tokens are due

    def __post_init__(self) -> None:
        if type(self.slo_class) is not str or len(self.slo_class) > MAX_CLASS:
            raise ValueError(f"slo_class must be a name of at most {MAX_CLASS} characters")
        _check_int("max_tokens", self.max_tokens, 0, MAX_INT)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_int("top_k", self.top_k, -1, MAX_INT)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_int("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        _check_int("n", self.n, 1, MAX_SAMPLES)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_int("seed", self.seed, MIN_SEED, MAX_SEED)
        if type(self.ignore_eos) is not bool:
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be true or false")
        _check_bias(self.logit_bias)
        _check_stops(self.stop, self.stop_token_ids)

    def __hash__(self) -> int:
        return hash((self.max_tokens, self.temperature, self.stop, self.n, self.seed))

    def with_seed(self, seed: int) -> "SamplingParams":
        """The same with another seed, without a second look at everything else."""
        _check_int("seed", seed, MIN_SEED, MAX_SEED)
        other = object.__new__(SamplingParams)
        for name in _OPTIONS:
            object.__setattr__(other, name, seed if name == "seed" else getattr(self, name))
        return other

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True when an option needs the token counts of its seat."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def needs_full(self) -> bool:
        """True when only the sampling program "full" serves it."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens)

    @property
    def sampler(self) -> int:
        """Index in SAMPLERS of the least program that serves it."""
        return 2 if self.needs_full else int(not self.is_greedy)


_OPTIONS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be a whole number from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not low <= number <= high or math.isinf(number):
        limit = "" if math.isinf(high) else f" to {high:g}"
        raise ValueError(f"{name}={value!r} must be a finite number from {low:g}{limit}")


def _check_bias(bias: object) -> None:
    entries = dict(cast(Mapping[object, object], bias)) if isinstance(bias, Mapping) else None
    if entries is None or len(entries) > MAX_BIAS:
        raise ValueError(f"logit_bias must map at most {MAX_BIAS} token ids to numbers")
    for token, value in entries.items():
        _check_int("logit_bias token id", token, 0, MAX_INT)
        _check_float(f"logit_bias[{token}]", value, -MAX_BIAS_VALUE, MAX_BIAS_VALUE)


def _check_stops(stop: object, stop_token_ids: object) -> None:
    for text in _short_tuple("stop", stop, MAX_STOP_STRINGS):
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            raise ValueError(f"stop={text!r} must be a string of 1 to {MAX_STOP_LENGTH} characters")
    for token in _short_tuple("stop_token_ids", stop_token_ids, MAX_STOP_IDS):
        _check_int("stop_token_ids entry", token, 0, MAX_INT)


def _short_tuple(name: str, value: object, most: int) -> tuple[object, ...]:
    entries = cast(tuple[object, ...], value) if isinstance(value, tuple) else None
    if entries is None or len(entries) > most:
        raise ValueError(f"{name}={value!r} must be a tuple of at most {most} entries")
    return entries


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SeatProgress:
    """Progress of the requests that run, by seat: a step moves hundreds of them on at once."""

    def __init__(self, seats: int) -> None:
        self.computed = np.zeros(seats, np.int32)
        self.in_flight = np.zeros(seats, np.int32)


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """`num_computed` tokens have their KV in the cache (or in a step already dispatched); the
    step's job is to catch up with `num_tokens`.  `eq=False`: a request is itself, not its contents.

    Progress belongs to the seat: without one, nothing is computed.
    """

    number: int  # unique in the engine, never the client's
    tokens: list[int]  # prompt, then output that the host knows
    num_prompt: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end it: EOS unless ignore_eos, and stop_token_ids
    seed: int = 0
    sample: int = 0  # which of n
    priority: int = 0  # lower runs first
    salt: str = ""  # prefix blocks are shared only between equal salts
    arrival: float = 0.0  # seconds, the engine's clock
    ttft_s: float = math.inf  # its first token is due so long after its arrival
    tpot_s: float = math.inf  # and each that follows so long after the one before was due
    anchor: float = math.inf  # when the first is due; without such a promise, when it came
    status: Status = Status.WAITING
    epoch: int = 0  # grows at preemption; a result of an older epoch is ignored
    num_cached: int = 0  # prompt tokens that a prefix hit saved at first admission
    max_total: int = 0  # tokens, prompt included, at which it ends with reason "length"
    reserved: int = 0  # blocks of tokens promised to it when it was admitted
    num_preempted: int = 0
    recompute_until: int = 0  # tokens below this had KV before a preemption
    admitted: float = -1.0  # when it first took a seat; seconds, the engine's clock
    num_chunks: int = 0  # of its prompt, those computed again included
    last_step: int = -1  # step in which it was queued or last got prefill tokens; -1: never
    digests: list[bytes] = dataclasses.field(
        default_factory=list[bytes]
    )  # hash chain of full blocks
    seat: int = -1  # place in per-request state while running
    seats: "SeatProgress | None" = None  # where its progress is kept while it has a seat
    num_blocks: int = 0  # blocks of tokens that it has room for in the KV
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None

    @property
    def num_computed(self) -> int:
        return 0 if self.seats is None else int(self.seats.computed[self.seat])

    @property
    def num_in_flight(self) -> int:
        """Sampled tokens of dispatched steps that the host has not read."""
        return 0 if self.seats is None else int(self.seats.in_flight[self.seat])

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host or on their way to it."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def max_kv(self) -> int:
        """Most tokens that will ever have KV: the last sampled token needs none."""
        return max(self.num_prompt, self.max_total - 1)

    @property
    def due(self) -> float:
        """When its next unknown token is due; seconds, the engine's clock."""
        done = self.num_tokens - self.num_prompt
        return self.anchor + (done * self.tpot_s if done else 0.0)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class TokenLogprobs(NamedTuple):
    """Raw model log-probability of one token, and the most likely ones (ties: lower id first)."""

    token: int
    logprob: float
    rank: int  # 1: the most likely
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first


class Output(msgspec.Struct, gc=False):
    """What a step brought for one request.

    A step makes one for every row: msgspec's constructor takes half the time of a NamedTuple's.
    `gc=False` holds since nothing that an output refers to refers back to it.
    """

    request: Request
    tokens: tuple[int, ...]  # new output tokens; nothing past the end of the request
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token, when asked for
    # Once, with the first output; None for token 0, which nothing predicts.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None  # None while it runs
