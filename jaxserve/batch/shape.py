"""What the time of a planned step depends on."""

import numpy as np

from jaxserve.costs import StepShape
from jaxserve.scheduler.plan import Plan


def shape_of(plan: Plan, rows: int, sampler: str, empty: StepShape) -> StepShape:
    """`rows` R and `sampler` are those of the step's sampling program; 0 and "none" without.
    `empty`: a step of nothing, `costs.no_step` of the model's windows."""
    contexts = plan.decodes.starts + 1
    chunks = plan.chunks
    if plan.num_singles > len(contexts):  # chunks of one token come first
        ones = plan.num_singles - len(contexts)
        more = np.array([chunk.start + 1 for chunk in chunks[:ones]], np.int32)
        contexts, chunks = np.concatenate([contexts, more]), chunks[ones:]
    shape = empty.with_singles(contexts)
    for _, start, num_tokens, _, _ in chunks:
        shape = shape.with_chunk(start, num_tokens)
    return shape._replace(bucket=plan.bucket, rows=rows, sampler=sampler)
