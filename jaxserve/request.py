"""A request, what it asks for, and its progress through the engine."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import NamedTuple

MAX_STOP_IDS = 16  # stop_token_ids a request may name beside the model's own EOS ids
MAX_BIAS = 300  # logit_bias entries
MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-4  # anything below is greedy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.  Invalid values raise ValueError here.

    `seed=None` takes one from the engine's base seed and the request's number.  Logprobs describe the raw model
    distribution (log-softmax in float32), whatever the other options say.
    """

    max_tokens: int = 128  # 0: only score the prompt
    temperature: float = 1.0  # below 1e-4: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # 0 to 20 most likely tokens beside the sampled one
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """`num_computed` tokens have their KV in the cache (or in a step already dispatched); the step's job is to
    catch up with `num_tokens`.  `eq=False`: a request is itself, never its contents."""

    number: int  # unique in the engine, never the client's
    tokens: list[int]  # prompt, then output that the host knows
    num_prompt: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # ends the request: EOS ids unless ignore_eos, and stop_token_ids
    seed: int = 0
    sample: int = 0  # which of n
    priority: int = 0  # lower runs first
    salt: str = ""  # prefix blocks are shared only between equal salts
    arrival: float = 0.0  # seconds, the engine's clock
    status: Status = Status.WAITING
    num_computed: int = 0
    num_in_flight: int = 0  # sampled tokens of dispatched steps that the host has not read
    epoch: int = 0  # grows at preemption; a result of an older epoch is ignored
    num_cached: int = 0  # prompt tokens that a prefix hit saved at first admission
    seat: int = -1  # place in per-request device state while running
    blocks: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host or on their way to it."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_pending(self) -> int:
        return len(self.tokens) + self.num_in_flight - self.num_computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class TokenLogprobs(NamedTuple):
    """Raw model log-probability of one token, and the most likely ones in its place (ties: lower id first)."""

    token: int
    logprob: float
    rank: int  # 1: the most likely
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first


class Output(NamedTuple):
    """What a step brought for one request."""

    request: Request
    tokens: tuple[int, ...]  # new output tokens; nothing past the end of the request
    logprobs: tuple[TokenLogprobs, ...] | None  # one a token, when asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None  # once, with the first output; None for token 0
    finish_reason: str | None  # None while it runs
