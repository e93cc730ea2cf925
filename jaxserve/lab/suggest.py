"""Which buckets a recorded run would have been served best by, and what each program more buys."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve import settings
from jaxserve.batch import buckets
from jaxserve.config import EngineConfig
from jaxserve.costs import CostModel
from jaxserve.kv.groups import Windows
from jaxserve.lab import bucket_search, demand
from jaxserve.lab.bucket_search import Best
from jaxserve.lab.demand import Demand
from jaxserve.lab.shapes import of_step
from jaxserve.lab.trace import Step, Trace
from jaxserve.scheduler import snap

AS_GOOD = 0.01  # of the device time: less is not worth a change, nor seen in a measurement
MORE = 3  # programs above the limit whose worth is told as well
_PER_OCTAVE = 8  # candidates between a size and its double


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the set may cost beside time; None: no limit."""

    programs: int | None = None
    compile_s: float | None = None  # added up over programs, as the recorded start took them
    memory_mib: float | None = None  # largest scratch and all code of the compiled programs


@dataclasses.dataclass(frozen=True)
class BucketSet:
    """A set, and what the recorded steps would take in it."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    programs: int
    compile_s: float
    memory_mib: float
    seconds: float  # device time of all steps
    time_waste: float  # share of it that padding takes
    slack: float = 0.0  # share of `seconds`: no allowed set of as many token buckets saves more


@dataclasses.dataclass(frozen=True)
class Suggestion:
    best: BucketSet | None  # None: the limits allow no set
    default: BucketSet  # what the engine derives from budget and max_seqs
    recorded: BucketSet
    ladder: tuple[BucketSet, ...]  # the best sets of one program more each time
    measured: bool  # False: no costs in the trace, so a padded token is a padded token
    steps: int

    @property
    def gain(self) -> float:
        """Share of the default's device time that the best set saves."""
        return 0.0 if self.best is None else 1 - self.best.seconds / self.default.seconds

    @property
    def default_is_as_good(self) -> bool:
        return self.gain < AS_GOOD


class _Prices:
    """What buckets cost in seconds, compiling and memory."""

    def __init__(self, trace: Trace, model: CostModel | None) -> None:
        self.model = model
        self.kinds: dict[str, list[tuple[int, float, float, float]]] = {}
        for program in trace.header.programs:
            kind, _, bucket = program["program"].rstrip("]").partition("[")
            facts = (program["compile_s"], program.get("temp", 0), program.get("code", 0))
            self.kinds.setdefault(kind, []).append((int(bucket), *facts))
        self.row_kinds = [k for k in self.kinds if k not in ("backbone", "seed_counts")]
        self.row_kinds = self.row_kinds or ["head", "greedy"]
        self.fixed = len(self.kinds.get("seed_counts", ()))

    def token_s(self, size: int) -> float:
        return float(size) if self.model is None else self.model.program_s(size)

    def row_s(self, sampler: str, rows: int) -> float:
        return 0.0 if self.model is None else self.model.sampling_s(sampler, rows)

    def programs(self, tokens: Sequence[int], rows: Sequence[int]) -> int:
        return len(tokens) + len(self.row_kinds) * len(rows) + self.fixed

    def compile_s(self, tokens: Sequence[int], rows: Sequence[int]) -> float:
        wanted = self._wanted(tokens, rows)
        return sum(self._fact(kind, size, 1) for kind, size in wanted)

    def memory_mib(self, tokens: Sequence[int], rows: Sequence[int]) -> float:
        wanted = self._wanted(tokens, rows)
        scratch = max(self._fact(kind, size, 2) for kind, size in wanted)
        return (scratch + sum(self._fact(kind, size, 3) for kind, size in wanted)) / (1 << 20)

    def _wanted(self, tokens: Sequence[int], rows: Sequence[int]) -> list[tuple[str, int]]:
        wanted = [("backbone", size) for size in tokens]
        wanted += [(kind, size) for kind in self.row_kinds for size in rows]
        return wanted + [("seed_counts", size) for size, *_ in self.kinds.get("seed_counts", ())]

    def _fact(self, kind: str, size: int, which: int) -> float:
        """On the line through the recorded programs of the kind."""
        known = sorted(self.kinds.get(kind, []))
        if not known:
            return 0.0
        return float(np.interp(size, [k[0] for k in known], [k[which] for k in known]))


class _Judge:
    """Puts a price on a pair of token and row buckets."""

    def __init__(self, trace: Trace, prices: _Prices, budget: int) -> None:
        self.prices, model = prices, prices.model
        self.demands = demand.of_steps(trace.steps, budget)
        self.rows = demand.of_rows(trace.steps)
        # A step costs at least its tokens; what it costs on top no bucket changes.
        self.attention_s = sum(_attention(step, model, trace.windows) for step in trace.steps)
        exact = {d.tokens: prices.token_s(d.tokens) for d in self.demands}
        self.ideal_s = sum(count * exact[d.tokens] for d, count in self.demands.items())
        self.ideal_s += sum(n * prices.row_s(kind, rows) for (kind, rows), n in self.rows.items())

    def rows_s(self, sizes: Sequence[int]) -> float:
        return sum(
            count * self.prices.row_s(kind, next(size for size in sizes if size >= rows))
            for (kind, rows), count in self.rows.items()
        )

    def of(self, tokens: tuple[int, ...], rows: tuple[int, ...], slack_s: float = 0.0) -> BucketSet:
        costs = np.maximum.accumulate([self.prices.token_s(size) for size in tokens])
        table = snap.CostTable(tokens, tuple(costs.tolist()), measured=True)
        padded = bucket_search.seconds(self.demands, table) + self.rows_s(rows)
        whole = padded + self.attention_s
        return BucketSet(
            tokens=tokens,
            rows=rows,
            programs=self.prices.programs(tokens, rows),
            compile_s=self.prices.compile_s(tokens, rows),
            memory_mib=self.prices.memory_mib(tokens, rows),
            seconds=whole,
            time_waste=max(0.0, padded - self.ideal_s) / whole if whole else 0.0,
            slack=slack_s / whole if whole else 0.0,
        )


def suggest(trace: Trace, limits: Limits, model: CostModel | None = None) -> Suggestion:
    """`model`: costs to use in place of those in the trace.

    Raises ValueError for a trace without steps, and where buckets are not free to choose.
    """
    config = settings.loads(trace.header.config)
    if config.runner.deterministic:
        raise ValueError("runner.deterministic pins one bucket; there is nothing to choose")
    if not trace.steps:
        raise ValueError("the trace has no steps")
    model = trace.header.costs if model is None else model
    rules = config.scheduler
    prices = _Prices(trace, model)
    judge = _Judge(trace, prices, rules.token_budget)
    single = config.buckets.tokens[0] == 1  # where the device is faster with one token than eight
    default = judge.of(
        buckets.token_buckets(rules.token_budget, rules.max_seqs, single=single),
        buckets.row_buckets(rules.max_seqs, single=single),
    )
    recorded = judge.of(config.buckets.tokens, config.buckets.rows)
    most = limits.programs or recorded.programs
    ladder = _ladder(judge, config, limits, most)
    within = [found for found in ladder if found.programs <= most]
    best = min(within, key=lambda found: (found.seconds, found.programs), default=None)
    return Suggestion(best, default, recorded, tuple(ladder), model is not None, len(trace.steps))


def token_candidates(
    budget: int, demands: Mapping[Demand, int], more: Sequence[int] = ()
) -> tuple[int, ...]:
    """Sizes to choose from: eight an octave, the commonest demands rounded up, `more`, and the
    budget."""
    step, size = buckets.SMALLEST, buckets.SMALLEST
    sizes = set[int](more)
    while size < budget:
        sizes.add(size)
        if size >= 2 * step * _PER_OCTAVE:
            step *= 2
        size += step
    by_count = sorted(demands.items(), key=lambda item: -item[1])
    rounded = [-(-d.tokens // buckets.SMALLEST) * buckets.SMALLEST for d, _ in by_count]
    sizes |= set(list(dict.fromkeys(rounded))[:16])
    return (*sorted(size for size in sizes if size < budget), budget)


def _ladder(judge: _Judge, config: EngineConfig, limits: Limits, most: int) -> list[BucketSet]:
    """The best set of each number of programs up to `most` and a little beyond."""
    prices, rules = judge.prices, config.scheduler
    per_row = len(prices.row_kinds)
    candidates = token_candidates(rules.token_budget, judge.demands, config.buckets.tokens)
    search = bucket_search.Search(judge.demands, candidates, prices.token_s)
    free = limits.compile_s is None and limits.memory_mib is None
    known: list[Best] = []
    found: dict[int, BucketSet] = {}
    sizes = token_candidates(rules.max_seqs, {}, config.buckets.rows)
    for rows in _row_sets(judge, sizes, (most - prices.fixed - 1) // per_row):
        room = min(most + MORE - prices.fixed - per_row * len(rows), len(candidates))
        if not (free and known):  # with the fewest rows there is room for the most tokens
            known = search.best_sets(room, _within(limits, prices, rows))
        for best in known[:room] if free else known:
            made = judge.of(best.sizes, rows, best.seconds - best.bound)
            rung = found.get(made.programs)
            if made.programs <= most + MORE and (rung is None or made.seconds < rung.seconds):
                found[made.programs] = made
    rungs: list[BucketSet] = []
    for _, made in sorted(found.items()):
        if not rungs or made.seconds < rungs[-1].seconds:
            rungs.append(made)
    return rungs


def _within(limits: Limits, prices: _Prices, rows: tuple[int, ...]) -> bucket_search.Allowed:
    def allowed(tokens: Sequence[int]) -> bool:
        if limits.compile_s is not None and prices.compile_s(tokens, rows) > limits.compile_s:
            return False
        most_mib = limits.memory_mib
        return most_mib is None or prices.memory_mib(tokens, rows) <= most_mib

    return allowed


def _row_sets(judge: _Judge, sizes: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """The best sets of 1 to `most` row buckets; rows are never cut, so that is the same search over
    steps of which nothing may be cut."""
    found: list[tuple[int, ...]] = []
    # Samplers differ in cost by a factor at most: their mean weight orders sets alike.
    demands = {Demand(rows, 0, rows): 0 for _, rows in judge.rows}
    for (_, rows), count in judge.rows.items():
        demands[Demand(rows, 0, rows)] += count
    kinds = [kind for kind, _ in judge.rows]
    common = max(set(kinds), key=kinds.count) if kinds else "greedy"

    def cost(size: int) -> float:
        return judge.prices.row_s(common, size)

    search = bucket_search.Search(demands, sizes, cost)
    for best in search.best_sets(max(1, min(most, len(sizes)))):
        if best.sizes not in found:
            found.append(best.sizes)
    return found


def _attention(step: Step, model: CostModel | None, windows: Windows) -> float:
    if model is None:
        return 0.0
    return model.attention_s(of_step(step, windows))
