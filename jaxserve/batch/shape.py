"""What the time of a planned step depends on."""

import numpy as np

from jaxserve.costs import StepShape, pairs, tile_pairs, turns
from jaxserve.scheduler.plan import Plan


def shape_of(plan: Plan, rows: int, sampler: str) -> StepShape:
    """`rows` R and `sampler` are those of the step's sampling program; 0 and "none" without."""
    contexts = plan.decodes.starts + 1
    chunks = plan.chunks
    if plan.num_singles > len(contexts):  # chunks of one token come first
        ones = plan.num_singles - len(contexts)
        more = np.array([chunk.start + 1 for chunk in chunks[:ones]], np.int32)
        contexts, chunks = np.concatenate([contexts, more]), chunks[ones:]
    return StepShape(
        bucket=plan.bucket,
        tokens=plan.num_tokens,
        rows=rows,
        sampler=sampler,
        singles=plan.num_singles,
        single_context=int(contexts.sum()),
        chunks=len(chunks),
        chunk_pairs=sum(pairs(start, num_tokens) for _, start, num_tokens, _, _ in chunks),
        single_turns=turns(contexts),
        tile_pairs=sum(tile_pairs(start, num_tokens) for _, start, num_tokens, _, _ in chunks),
    )
