"""What a caller gets back: whole completions, and chunks of one while it runs."""

import dataclasses
from typing import NamedTuple

from jaxserve.request import TokenLogprobs


class Chunk(NamedTuple):
    """A piece of one sample as it is generated.  `text` may lag behind `token_ids`: a character,
    or what may be the beginning of a stop string, is held back until it is certain."""

    index: int  # which of the n samples
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None  # one a token, when asked for
    finish_reason: str | None  # None while the sample runs


class Usage(NamedTuple):
    """Tokens of one completion, all samples together; `cached_tokens` is the part of the prompt
    that a prefix hit saved."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Timings(NamedTuple):
    """Seconds since the prompt was submitted; `ttft_s` is None when no token was generated."""

    ttft_s: float | None
    total_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One of the n answers to a prompt.

    `token_ids` holds everything that was generated, the end-of-sequence id or the token that
    completed a stop string included; `text` holds neither.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop | length | abort | error
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one a token
    error: str | None = None  # why, when finish_reason is "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """Everything generated for one prompt."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Sample, ...]  # by index, n of them
    prompt_logprobs: (
        tuple[TokenLogprobs | None, ...] | None
    )  # one a prompt token; None for the first
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.outputs[0].text
