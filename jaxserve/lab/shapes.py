"""The shape of a step from what it runs: decodes and chunks."""

from collections.abc import Sequence

from jaxserve.costs import StepShape, pairs


def shape(
    bucket: int,
    decodes: int,
    context: int,
    chunks: Sequence[tuple[int, int]],
    *,
    rows: int,
    sampler: str,
) -> StepShape:
    """`context`: KV entries that all decodes read; `chunks`: start and tokens of each."""
    long = [(start, n) for start, n in chunks if n > 1]
    ones = [start + 1 for start, n in chunks if n == 1]
    values = {
        "bucket": bucket,
        "tokens": decodes + sum(n for _, n in chunks),
        "rows": rows,
        "sampler": sampler,
        "singles": decodes + len(ones),
        "single_context": context + sum(ones),
        "chunks": len(long),
        "chunk_context": sum(start + n for start, n in long),
        "chunk_pairs": sum(pairs(start, n) for start, n in long),
    }
    return StepShape(**{name: values[name] for name in StepShape._fields})
