"""What the scheduler decides for one step, as values."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.request import Request
from jaxserve.scheduler.time_budget import StepTime

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


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


class Decodes(NamedTuple):
    """One token each for many requests: their last one, from which the next is sampled."""

    requests: Sequence[Request]
    tokens: Sequence[list[int]]  # theirs, to which what is sampled is appended
    epochs: Sequence[int]  # as in Chunk
    seats: Ints
    starts: Ints  # position of the token
    limits: Ints  # tokens at which the request ends with reason "length"
    on_device: Bools  # the host does not know the token yet
    generation: int  # while the scheduler's is the same, all epochs hold
    stop_ids: frozenset[int]  # of all of them; others may be among these


_NOTHING = np.zeros(0, np.int32)
NO_DECODES = Decodes(
    requests=(),
    tokens=(),
    epochs=(),
    seats=_NOTHING,
    starts=_NOTHING,
    limits=_NOTHING,
    on_device=np.zeros(0, np.bool_),
    generation=0,
    stop_ids=frozenset(),
)


class Plan(NamedTuple):
    """One step: the decodes' rows, then the chunks'.  Chunks of one token come first."""

    decodes: Decodes
    chunks: list[Chunk]
    num_singles: int  # rows with one token
    num_tokens: int
    bucket: int  # tokens of the compiled shape
    recomputed_tokens: int  # tokens that had KV before a preemption
    admitted: tuple[Request, ...]  # took a seat in this step
    preempted: tuple[Request, ...]  # lost theirs
    hit_tokens: int  # found in the prefix cache by requests admitted for the first time
    resume_hit_tokens: int  # found there by requests that resume
    unused: Unused | None  # None: the budget was used up
    last_chunk: int  # tokens of the chunk that snapping may cut, before it did; 0: none
    cut_tokens: int  # that snapping took from it

    @property
    def decode_tokens(self) -> int:
        return len(self.decodes.requests)


@dataclasses.dataclass(slots=True, eq=False)
class Draft:
    """A step while it is being decided."""

    left: int  # tokens of the budget
    prefills: list[tuple[Request, int]]
    admitted: list[Request]
    preempted: list[Request]
    decodes: Decodes = NO_DECODES
    partials: int = 0  # prompts in the middle of their prefill after this step
    longs: int = 0  # of those, long ones
    time: StepTime | None = None  # what still fits, where time limits the step
    held: Bools | None = None  # bool[seats]: decodes that wait for prefills; None: nobody
    closed: Unused | None = None  # why nobody more is admitted
    indivisible: bool = False  # a whole chunk did not fit
    hit_tokens: int = 0
    resume_hit_tokens: int = 0
