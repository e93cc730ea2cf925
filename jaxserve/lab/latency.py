"""When tokens came, from a trace.  Milliseconds."""

import itertools
from collections.abc import Sequence

from jaxserve.lab.trace import RequestRow, Trace


def token_times(trace: Trace, row: RequestRow) -> list[float]:
    """Of each output token as it was at the host, since the start of the trace."""
    steps = trace.steps
    numbers = itertools.chain.from_iterable(range(s, s + count) for s, count in row.runs)
    return [(steps[n].at + steps[n].landed) / 1e3 for n in numbers if n < len(steps)]


def ttfts(trace: Trace) -> list[float]:
    """Of the requests that got a token."""
    firsts = ((row, token_times(trace, row)[:1]) for row in trace.requests)
    return [first[0] - row.arrived / 1e3 for row, first in firsts if first]


def gaps(trace: Trace) -> list[float]:
    """Between two tokens of one request."""
    times = (token_times(trace, row) for row in trace.requests)
    return [b - a for found in times for a, b in itertools.pairwise(found)]


def curve(values: Sequence[float], points: int = 101) -> list[float]:
    """Quantiles 0, ..., 1, evenly spaced; [] for no values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [ordered[round(q * last / (points - 1))] for q in range(points)] if ordered else []
