"""What a bucket costs, and whether the last chunk is cut so that the step fits a smaller one."""

import bisect
import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class CostTable:
    """Cost of a step in each token bucket, ascending; seconds once measured, else padded tokens."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    measured: bool = False

    def bucket(self, num_tokens: int) -> int:
        """The smallest bucket that holds `num_tokens`."""
        return self.sizes[bisect.bisect_left(self.sizes, num_tokens)]

    def cost(self, num_tokens: int) -> float:
        """Cost of the bucket that holds `num_tokens`; 0 for an empty step."""
        return self.costs[bisect.bisect_left(self.sizes, num_tokens)] if num_tokens else 0.0

    def interpolate(self, num_tokens: int) -> float:
        """Cost of a shape of exactly `num_tokens`, on the line through the buckets around it."""
        if len(self.sizes) == 1:
            return self.costs[0] * num_tokens / self.sizes[0]
        at = min(max(bisect.bisect_left(self.sizes, num_tokens), 1), len(self.sizes) - 1)
        low, high = self.sizes[at - 1], self.sizes[at]
        share = (num_tokens - low) / (high - low)
        return max(0.0, self.costs[at - 1] + share * (self.costs[at] - self.costs[at - 1]))

    def padding_share(self, num_tokens: int, step: float | None = None) -> float:
        """Share of a step's time that padding costs, 0 to 1; `step`: cost of the whole step where
        that is more than its program's."""
        cost = self.cost(num_tokens)
        lost = cost - self.interpolate(num_tokens)
        return min(1.0, max(0.0, lost / max(cost, step or 0.0))) if cost else 0.0


def padded_tokens(sizes: tuple[int, ...]) -> CostTable:
    """The table in use until costs are measured."""
    return CostTable(sizes, tuple(float(size) for size in sizes))


def measured(sizes: tuple[int, ...], seconds: dict[int, float]) -> CostTable:
    """Raises ValueError unless every bucket has a cost; a larger bucket never counts as cheaper."""
    missing = [size for size in sizes if not seconds.get(size, 0.0) > 0.0]
    if missing:
        raise ValueError(f"no measured seconds for token buckets {missing}")
    costs: list[float] = []
    for size in sizes:
        costs.append(max(seconds[size], costs[-1] if costs else 0.0))
    return CostTable(sizes, tuple(costs), measured=True)


def tokens_to_cut(num_tokens: int, last_chunk: int, decodes: int, table: CostTable) -> int:
    """Tokens to take from the last prefill chunk so that the step fits the next smaller bucket.

    The rest of the chunk runs in the next step beside the decodes, so cutting pays when the smaller
    bucket now and the rest's extra cost then are together less than the bucket now.
    """
    smaller = bisect.bisect_left(table.sizes, num_tokens) - 1
    if smaller < 0 or num_tokens == table.sizes[smaller + 1]:
        return 0
    cut = num_tokens - table.sizes[smaller]
    if cut >= last_chunk:
        return 0
    later = table.cost(min(decodes + cut, table.sizes[-1])) - table.cost(decodes)
    return cut if table.costs[smaller] + later < table.costs[smaller + 1] else 0
