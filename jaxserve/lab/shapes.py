"""The shape of a step from what it runs: decodes and chunks."""

from collections.abc import Sequence

import numpy as np

from jaxserve.costs import NO_STEP, StepShape


def shape(
    bucket: int,
    decodes: int,
    context: int,
    chunks: Sequence[tuple[int, int]],
    *,
    rows: int,
    sampler: str,
) -> StepShape:
    """`context`: KV entries that all decodes read, taken as equally many each; `chunks`: start and
    tokens of each."""
    each, more = divmod(context, max(1, decodes))
    contexts = np.array([each + 1] * more + [each] * (decodes - more), np.int32)
    found = NO_STEP.with_singles(contexts)
    for start, n in chunks:
        found = found.with_chunk(start, n)
    return found._replace(bucket=bucket, rows=rows, sampler=sampler)
