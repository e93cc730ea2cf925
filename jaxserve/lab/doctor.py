"""What is wrong with a run, from its trace: the ways in which chunks, budget and cache fail."""

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxserve import settings
from jaxserve.config import EngineConfig
from jaxserve.kv.groups import Windows
from jaxserve.lab import latency
from jaxserve.lab.shapes import of_step
from jaxserve.lab.trace import Step, Trace
from jaxserve.offline.figures import quantile

STALL = 4.0  # a mixed step of more times a decode is too long, where no limit is given
OFTEN = 0.01  # of the gaps between tokens: a rarer stall is no finding
SMALL = 0.15  # of the time a token of a full step takes, that a budget twice as large would save
RECOMPUTED = 0.02  # of the prefilled tokens
STRETCH = 2.0  # a prompt's prefill takes more times the steps it needs alone
VARIES = 1.5  # P95 of the times of one kind of step against their median
EXPLAINS = 0.5  # of the variance
MISSED = 0.05  # of the prompt tokens
LEAKED = 0.01  # of the pool
_ENOUGH = 20  # steps or gaps, for a quantile


@dataclasses.dataclass(frozen=True)
class Finding:
    """One diagnosis."""

    name: str
    what: str  # the figures, in a sentence
    turn: str  # the knob, and to what
    figures: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run, and the time a token may take, None where no limit is given."""

    trace: Trace
    config: EngineConfig
    tpot_ms: float | None = None

    @property
    def steps(self) -> list[Step]:
        return self.trace.steps

    def program_ms(self, bucket: int) -> float | None:
        """Of a token bucket: by the costs in the trace, else as the steps took."""
        if self.trace.header.costs is not None:
            return 1e3 * self.trace.header.costs.program_s(bucket)
        known = [s.device / 1e3 for s in self.steps if s.bucket == bucket]
        return statistics.median(known) if known else None

    @property
    def knob(self) -> str:
        """The setting that says how many tokens of a prompt a step takes."""
        equal = self.config.scheduler.mode == "fixed" or self.config.runner.deterministic
        return "scheduler.chunk_size" if equal else "scheduler.token_budget"


def diagnose(trace: Trace, *, tpot_ms: float | None = None) -> list[Finding]:
    """Everything found; [] for a run in which nothing stands out.

    Raises ValueError for a trace without steps.
    """
    if not trace.steps:
        raise ValueError("the trace has no steps")
    case = Case(trace, settings.loads(trace.header.config), tpot_ms)
    found: list[Finding | None] = [check(case) for check in CHECKS]
    findings = [finding for finding in found if finding is not None]
    if any(finding.name == CHUNK_TOO_BIG for finding in findings):
        # What is too long for the decodes is not made longer for the prompts.
        findings = [finding for finding in findings if finding.name != CHUNK_TOO_SMALL]
    return findings


CHUNK_TOO_BIG = "chunk too big"
CHUNK_TOO_SMALL = "chunk too small"
THRASH = "too many partial prefills and thrash"
TIME_VARIES = "budget fine but time varies"
OUT_OF_STEP = "prefix cache and chunks out of step"
NOT_RELEASED = "cancelled work not released"


def chunk_too_big(case: Case) -> Finding | None:
    """Steps that carry prompts beside decodes hold the decodes up."""
    decodes = [s.device / 1e3 for s in case.steps if s.kind == "decode"]
    mixed = [s for s in case.steps if s.kind == "mixed"]
    alone = (
        statistics.median(decodes) if decodes else case.program_ms(case.config.buckets.tokens[0])
    )
    gaps = sum(s.decodes for s in case.steps)
    if not mixed or alone is None or gaps < _ENOUGH:
        return None
    limit = case.tpot_ms if case.tpot_ms is not None else STALL * alone
    long = [s for s in mixed if s.device / 1e3 > limit]
    held = sum(s.decodes for s in long)
    if held < OFTEN * gaps or alone > limit:
        return None
    worst = quantile([s.device / 1e3 for s in long], 0.99) or 0.0
    fits = _largest_that_fits(case, limit)
    judged = (
        f"the TPOT limit of {limit:.4g} ms"
        if case.tpot_ms is not None
        else f"{STALL:g} times a step of decodes alone"
    )
    return Finding(
        CHUNK_TOO_BIG,
        f"{held / gaps:.1%} of the gaps between tokens lie behind a step with a chunk that takes "
        f"longer than {judged}: up to {worst:.4g} ms (P99); decodes alone take {alone:.4g} ms",
        f"lower {case.knob} from {_knob_value(case)}"
        + (f" to {fits}" if fits else "")
        + ", or let deadlines cut the steps: scheduler.mode = time",
        {
            "held_share": held / gaps,
            "limit_ms": limit,
            "p99_ms": worst,
            "decode_ms": alone,
            "fits": fits,
        },
    )


def chunk_too_small(case: Case) -> Finding | None:
    """Prompts go through in steps that mostly pay for being a step."""
    size = min(_knob_value(case), case.config.scheduler.token_budget)
    full = [s for s in case.steps if s.prefill and s.tokens >= size]
    prefills = [s for s in case.steps if s.prefill]
    whole, half = case.program_ms(_bucket(case, size)), case.program_ms(_bucket(case, size // 2))
    if len(full) < _ENOUGH or whole is None or half is None or 2 * len(full) < len(prefills):
        return None
    size_half = _bucket(case, size // 2)
    if size_half >= size:
        return None
    slope = max(0.0, (whole - half) / (size - size_half))
    saved = 1 - (whole + slope * size) / (2 * whole)
    twice = whole + slope * size
    if saved < SMALL or (case.tpot_ms is not None and twice > case.tpot_ms):
        return None
    per_prompt = _chunks_per_prompt(case)
    ttft = quantile(latency.ttfts(case.trace), 0.5)
    return Finding(
        CHUNK_TOO_SMALL,
        f"{len(full)} of {len(prefills)} steps with chunks are full at {size} tokens, of which "
        f"{1 - slope * size / whole:.0%} of the time does not depend on tokens; a prompt takes "
        f"{per_prompt:.1f} chunks; half of the first tokens come after {ttft or 0:.4g} ms",
        f"raise {case.knob} from {size} to {2 * size}: a token would cost {saved:.0%} less, the "
        f"step {twice:.4g} ms instead of {whole:.4g}",
        {
            "full_steps": len(full),
            "prefill_steps": len(prefills),
            "saved": saved,
            "chunks_per_prompt": per_prompt,
            "step_ms": whole,
            "twice_ms": twice,
        },
    )


def thrash(case: Case) -> Finding | None:
    """Prompts in the middle of their prefill hold each other up, or push each other out."""
    preempted = sum(len(s.preempted) for s in case.steps)
    recomputed = sum(s.recomputed for s in case.steps)
    prefilled = sum(s.prefill for s in case.steps) or 1
    stretch, together = _stretch(case)
    rules = case.config.scheduler
    parts: list[str] = []
    turns: list[str] = []
    if preempted and recomputed > RECOMPUTED * prefilled:
        used = quantile([s.kv_used for s in case.steps], 0.5) or 0
        parts.append(
            f"{preempted} preemptions had {recomputed / prefilled:.1%} of all prefilled tokens "
            f"computed again; half of the time at least {used} of {case.config.cache.num_blocks} "
            f"blocks are in use"
        )
        if not rules.reserve_full_prompt:
            turns.append("set scheduler.reserve_full_prompt = true")
        turns.append(
            f"lower scheduler.max_seqs from {rules.max_seqs}, or give the pool more "
            f"(cache.memory_gib, cache.num_blocks)"
        )
    if stretch > STRETCH and together > 2:
        parts.append(
            f"{together:.0f} prompts at a time (P90) are in the middle of their prefill, and half "
            f"of those cut in chunks take {stretch:.1f} times the steps that they need alone"
        )
        turns.append(
            f"lower scheduler.max_partial_prefills from {rules.max_partial_prefills} and "
            f"max_long_partial_prefills from {rules.max_long_partial_prefills}"
            + (", or scheduler.policy = fcfs" if rules.policy == "round_robin" else "")
        )
    if not parts:
        return None
    return Finding(
        THRASH,
        "; ".join(parts),
        "; ".join(turns),
        {
            "preemptions": preempted,
            "recomputed_share": recomputed / prefilled,
            "stretch": stretch,
            "partial_prefills_p90": together,
        },
    )


def time_varies(case: Case) -> Finding | None:
    """Steps of one bucket take one time here and another there."""
    if chunk_too_big(case) is not None:
        return None
    groups: dict[tuple[int, str], list[Step]] = {}
    for step in case.steps:
        groups.setdefault((step.bucket, step.kind), []).append(step)
    worst: Finding | None = None
    most = VARIES
    for (bucket, kind), steps in groups.items():
        if len(steps) < _ENOUGH:
            continue
        times = np.array([s.device / 1e3 for s in steps])
        median, high = float(np.median(times)), float(np.quantile(times, 0.95))
        if not median or high / median <= most:
            continue
        most = high / median
        explained = _explained(steps, times, case.trace.windows)
        if explained >= EXPLAINS:
            why = f"contexts explain {explained:.0%} of that"
            turn = "let deadlines cut the steps by predicted time: scheduler.mode = time"
        else:
            why = f"contexts explain only {explained:.0%} of that: something else does"
            turn = (
                "look for what shares the device or the host's cores; the scheduler cannot know it"
            )
        worst = Finding(
            TIME_VARIES,
            f"{len(steps)} {kind} steps of {bucket} tokens take {median:.4g} ms in the median and "
            f"{high:.4g} ms at P95, {most:.1f} times as long; {why}",
            turn,
            {
                "bucket": bucket,
                "kind": kind,
                "median_ms": median,
                "p95_ms": high,
                "explained": explained,
            },
        )
    return worst


def out_of_step(case: Case) -> Finding | None:
    """Prefixes that others had computed or were computing, computed again."""
    rows = case.trace.requests
    same, evicted, rounded = (sum(row.missed[part] for row in rows) for part in range(3))
    prompt = sum(row.prompt for row in rows) or 1
    cached = sum(row.cached for row in rows)
    missed = same + evicted + rounded
    if missed <= MISSED * prompt:
        return None
    turns: list[str] = []
    cache, rules = case.config.cache, case.config.scheduler
    if same >= max(evicted, rounded):
        turns.append(
            "let one request of a prefix go ahead of the others (`jaxserve batch` orders lines so "
            "unless --in-order; n samples of one prompt wait by themselves)"
        )
    if evicted >= max(same, rounded):
        turns.append("give the pool more (cache.memory_gib, cache.num_blocks)")
    if rounded >= max(same, evicted):
        turns.append(
            f"hits are rounded down to whole chunks: lower scheduler.chunk_size from "
            f"{rules.chunk_size}, a multiple of cache.block_size = {cache.block_size}"
        )
    return Finding(
        OUT_OF_STEP,
        f"{missed} of {prompt} prompt tokens lie in prefixes that another request had, and were "
        f"computed all the same ({cached} were found): {same} while the other was still in its "
        f"chunks, {evicted} after its blocks were evicted, {rounded} because hits are cut to whole "
        f"chunks",
        "; ".join(turns),
        {
            "missed": missed,
            "same_time": same,
            "evicted": evicted,
            "rounded": rounded,
            "cached": cached,
            "prompt": prompt,
        },
    )


def not_released(case: Case) -> Finding | None:
    """Blocks or steps for requests that have ended."""
    steps = case.steps
    late = sum(s.late for s in steps)
    last = steps[-max(1, len(steps) // 4) :]
    # Requests whose last token is on its way hold blocks for a step or two: the least is telling.
    left = min(s.kv_used - s.kv_live for s in last)
    pool = case.config.cache.num_blocks
    ended = sum(row.reason == "abort" for row in case.trace.requests)
    if not late and not (ended and left > max(1, LEAKED * pool)):
        return None
    left = max(0, left)
    return Finding(
        NOT_RELEASED,
        f"after {ended} cancelled requests {left} of {pool} blocks belong to nobody that runs, and "
        f"{late} tokens were computed for requests that had ended",
        "no setting: Engine.finish must free seat and blocks at once; report it with this trace",
        {"cancelled": ended, "blocks": left, "late_tokens": late},
    )


CHECKS: tuple[Callable[[Case], Finding | None], ...] = (
    chunk_too_big,
    chunk_too_small,
    thrash,
    time_varies,
    out_of_step,
    not_released,
)


def _knob_value(case: Case) -> int:
    rules = case.config.scheduler
    return rules.chunk_size if case.knob.endswith("chunk_size") else rules.token_budget


def _bucket(case: Case, tokens: int) -> int:
    sizes = case.config.buckets.tokens
    return sizes[min(bisect.bisect_left(sizes, max(1, tokens)), len(sizes) - 1)]


def _largest_that_fits(case: Case, limit_ms: float) -> int | None:
    """The largest bucket below the knob's value whose step fits the limit."""
    known = [(size, case.program_ms(size)) for size in case.config.buckets.tokens]
    fits = [size for size, ms in known if ms is not None and ms <= limit_ms]
    fits = [size for size in fits if size < _knob_value(case)]
    return max(fits, default=None)


def _chunks_per_prompt(case: Case) -> float:
    counts: dict[int, int] = {}
    for request, _, _ in itertools.chain.from_iterable(s.chunks for s in case.steps):
        counts[request] = counts.get(request, 0) + 1
    return statistics.mean(counts.values()) if counts else 0.0


def _stretch(case: Case) -> tuple[float, float]:
    """Median over prompts of several chunks of the steps from first to last against those needed
    alone, and P90 of the prompts in the middle of their prefill."""
    prompt = {row.number: row.prompt for row in case.trace.requests}
    spans: dict[int, tuple[int, int, int]] = {}  # first step, last step, tokens
    partial: set[int] = set()
    counts: list[int] = []
    for number, step in enumerate(case.steps):
        partial -= set(step.preempted)
        for request, start, tokens in step.chunks:
            first, _, before = spans.get(request, (number, number, 0))
            spans[request] = (first, number, before + tokens)
            if start + tokens < prompt.get(request, 0):
                partial.add(request)
            else:
                partial.discard(request)
        counts.append(len(partial))
    size = _knob_value(case)
    ratios = [
        (last - first + 1) / -(-tokens // size)
        for first, last, tokens in spans.values()
        if last > first
    ]
    return (statistics.median(ratios) if ratios else 0.0), float(quantile(counts, 0.9) or 0)


def _explained(steps: Sequence[Step], times: np.ndarray, windows: Windows) -> float:
    """Share of the variance of times that contexts explain (R squared of least squares)."""
    shapes = [of_step(step, windows) for step in steps]
    context = [shape.single_context for shape in shapes]
    chunk = [shape.chunk_pairs for shape in shapes]
    terms = np.stack([np.ones(len(steps)), np.array(context, float), np.array(chunk, float)], 1)
    terms /= np.maximum(terms.max(axis=0), 1.0)
    fitted = terms @ np.linalg.lstsq(terms, times, rcond=None)[0]
    spread = float(((times - times.mean()) ** 2).sum())
    return max(0.0, 1 - float(((times - fitted) ** 2).sum()) / spread) if spread else 0.0
