"""The shape of a step from what it runs: decodes and chunks."""

from collections.abc import Sequence

import numpy as np

from jaxserve.costs import StepShape, no_step
from jaxserve.kv.groups import FULL, Windows
from jaxserve.lab.trace import Step


def shape(
    bucket: int,
    decodes: int,
    context: int,
    chunks: Sequence[tuple[int, int]],
    *,
    rows: int,
    sampler: str,
    windows: Windows = FULL,
) -> StepShape:
    """`context`: KV entries before all decodes, taken as equally many each; `chunks`: start and
    tokens of each; `windows`: of the groups of layers."""
    each, more = divmod(context, max(1, decodes))
    contexts = np.array([each + 1] * more + [each] * (decodes - more), np.int32)
    found = no_step(windows).with_singles(contexts)
    for start, n in chunks:
        found = found.with_chunk(start, n)
    return found._replace(bucket=bucket, rows=rows, sampler=sampler)


def of_step(step: Step, windows: Windows) -> StepShape:
    """Of a recorded step; `rows` is what sampled, not the bucket."""
    return shape(
        step.bucket,
        step.decodes,
        step.context,
        [(start, n) for _, start, n in step.chunks],
        rows=step.sampled,
        sampler=step.sampler,
        windows=windows,
    )
