"""What the scheduler decides for one step, as values."""

import dataclasses
import enum
from typing import NamedTuple

from jaxserve.request import Request


class Chunk(NamedTuple):
    """`num_tokens` tokens of `request` from position `start`.

    A result counts only while `epoch` is still the request's.  `samples`: the chunk ends with the
    last known token, so its last row gives a new one.
    """

    request: Request
    start: int
    num_tokens: int
    epoch: int
    samples: bool


class Unused(enum.StrEnum):
    """Why part of the token budget was not used."""

    NO_WORK = "no_work"
    MAX_SEQS = "max_seqs"
    KV = "kv"
    POLICY = "policy"
    INDIVISIBLE = "indivisible"
    SNAP = "snap"
    TIME_BUDGET = "time_budget"
    NOT_READY = "host_not_ready"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step.  Chunks of one token come first."""

    chunks: list[Chunk]
    num_singles: int  # the first so many chunks have one token
    num_tokens: int
    bucket: int  # tokens of the compiled shape
    decode_tokens: int  # tokens that are output of their request
    recomputed_tokens: int  # tokens that had KV before a preemption
    admitted: tuple[Request, ...]  # took a seat in this step
    preempted: tuple[Request, ...]  # lost theirs
    hit_tokens: int  # found in the prefix cache by requests admitted for the first time
    resume_hit_tokens: int  # found there by requests that resume
    unused: Unused | None  # None: the budget was used up
