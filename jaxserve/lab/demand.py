"""What the steps of a trace would have been had nothing been cut to fit a bucket: the demand that a
bucket set serves well or badly."""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxserve.lab.trace import Step


class Demand(NamedTuple):
    """One step before it is snapped."""

    tokens: int
    last_chunk: int  # what snapping may cut; 0: nothing
    decodes: int


def of_steps(steps: Sequence[Step], budget: int) -> collections.Counter[Demand]:
    """How often each demand came.

    Tokens that snapping cut from a step came again in the next; they belong where they were cut, so
    they are taken from the first step behind it that did not use up the budget anyway.
    """
    found: collections.Counter[Demand] = collections.Counter()
    owed = 0
    for step in steps:
        tokens, last_chunk = step.tokens + step.cut, step.last_chunk
        if owed and tokens < budget:
            again = min(owed, tokens - step.decodes)
            owed -= again
            tokens -= again
            last_chunk = min(last_chunk, tokens - step.decodes)
        owed += step.cut
        if tokens >= budget:  # fits its bucket exactly: never cut
            found[Demand(tokens, 0, 0)] += 1
        elif tokens:
            found[Demand(tokens, last_chunk, step.decodes)] += 1
    return found


def of_rows(steps: Iterable[Step]) -> collections.Counter[tuple[str, int]]:
    """How often each sampling program was asked for how many rows."""
    return collections.Counter((s.sampler, s.sampled) for s in steps if s.sampled)
