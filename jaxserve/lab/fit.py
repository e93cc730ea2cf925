"""A cost model from measured steps: least squares on relative errors, no cost below 0, and steps
that fit badly weigh less (Huber 1964), so that a pause of the machine does not bend the rest."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxserve.costs import CostModel, StepShape

_ROUNDS = 12
_HUBER = 1.345  # of the residuals' spread; 95 % as efficient as least squares on normal noise
_LEAST = 1e-9  # seconds of a program, which must be above 0
TERMS = {
    "single": "singles",
    "single_context": "single_context",
    "turn": "single_turns",
    "turn_row": "turn_rows",
    "chunk": "chunks",
    "chunk_pair": "chunk_pairs",
    "tile_pair": "tile_pairs",
}

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative differences between predicted and measured seconds; shares of what was measured."""

    median: float
    p95: float
    steps: int


AIM = Errors(0.05, 0.15, 0)  # of steps that were not fitted
LIMIT = Errors(0.15, 0.45, 0)  # beyond it a table is no use


def verdict(found: Errors) -> str:
    """Of errors on steps that were not fitted: "good", within `AIM`; "rough", within `LIMIT`; else
    "useless"."""
    for name, bound in (("good", AIM), ("rough", LIMIT)):
        if found.median <= bound.median and found.p95 <= bound.p95:
            return name
    return "useless"


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """Raises ValueError without steps."""
    if not len(measured):
        raise ValueError("no steps to compare with")
    off = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return Errors(float(np.median(off)), float(np.quantile(off, 0.95)), len(off))


def fit(shapes: Sequence[StepShape], seconds: Sequence[float]) -> CostModel:
    """Raises ValueError without steps, or for seconds that are not above 0.

    The buckets of the model are those that occur; where rows of a bucket were never sampled with a
    sampler, its cost is on the line through the row buckets where they were.
    """
    y = np.asarray(seconds, float)
    if not len(y) or not (y > 0).all():
        raise ValueError("a cost model is fitted to steps that took time")
    tokens = tuple(sorted({shape.bucket for shape in shapes}))
    samplers = sorted({(s.sampler, s.rows) for s in shapes if s.rows})
    columns: list[Floats] = [np.array([s.bucket == size for s in shapes], float) for size in tokens]
    columns += [
        np.array([(s.sampler, s.rows) == known for s in shapes], float) for known in samplers
    ]
    columns += [np.array([getattr(s, of) for s in shapes], float) for of in TERMS.values()]
    found = _solve(np.stack(columns, axis=1), y)
    programs, rest = found[: len(tokens)], found[len(tokens) :]
    sampled = dict(zip(samplers, rest.tolist(), strict=False))
    rows = tuple(sorted({row for _, row in samplers}))
    kinds = sorted({kind for kind, _ in samplers})
    return CostModel(
        tokens=tokens,
        program=tuple(max(_LEAST, x) for x in programs.tolist()),
        rows=rows,
        sampling={kind: _on_rows(kind, rows, sampled) for kind in kinds},
        **dict(zip(TERMS, rest[len(samplers) :].tolist(), strict=True)),
    )


def host(rows: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds of the host a step, and a row of it."""
    y = np.asarray(seconds, float)
    x = np.stack([np.ones(len(y)), np.asarray(rows, float)], axis=1)
    a, b = _solve(x, y).tolist()
    return a, b


def _on_rows(
    kind: str, rows: Sequence[int], sampled: dict[tuple[str, int], float]
) -> tuple[float, ...]:
    known = [row for row in rows if (kind, row) in sampled]
    costs = np.interp(rows, known, [sampled[kind, row] for row in known])
    return tuple(costs.tolist())


def _solve(x: Floats, y: Floats) -> Floats:
    """The least sum of Huber's function of (x @ found) / y - 1, found >= 0."""
    from scipy.optimize import nnls  # half a second to load, and most simulations fit nothing

    scale = np.maximum(np.abs(x).max(axis=0), 1e-300)
    a = x / scale / y[:, None]
    weights = np.ones(len(y))
    found = np.zeros(x.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found, _ = nnls(a * root[:, None], root)
        off = np.abs(a @ found - 1)
        spread = 1.4826 * float(np.median(off)) + 1e-6  # as a standard deviation
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(off, 1e-12))
    return found / scale
