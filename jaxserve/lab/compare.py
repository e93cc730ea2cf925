"""Configurations against each other: fresh processes, interleaved, with intervals."""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxserve import settings
from jaxserve.kv.groups import context_tokens
from jaxserve.lab import latency, stats, trace
from jaxserve.lab.stats import Contrast, Interval
from jaxserve.lab.trace import Trace

# Name -> where it stands in the object that bench prints, unit, and whether more is better.
FIGURES: dict[str, tuple[tuple[str, ...], str, bool]] = {
    "output tokens/s": (("output_tokens_per_s",), "", True),
    "total tokens/s": (("total_tokens_per_s",), "", True),
    "goodput requests/s": (("goodput", "requests_per_s"), "", True),
    "goodput share": (("goodput", "share"), "%", True),
    "TTFT p50": (("ttft_s", "p50"), "s", False),
    "TTFT p99": (("ttft_s", "p99"), "s", False),
    "ITL p50": (("itl_ms", "p50"), "ms", False),
    "ITL p99": (("itl_ms", "p99"), "ms", False),
    "TPOT p50": (("tpot_ms", "p50"), "ms", False),
    "TPOT p99": (("tpot_ms", "p99"), "ms", False),
    "largest stall": (("stall", "largest_gap_ms"), "ms", False),
    "time waste": (("time_waste",), "%", False),
    "token waste": (("token_waste",), "%", False),
    "device idle": (("device_idle_share",), "%", False),
    "host ms/step": (("host_ms_per_step",), "ms", False),
    "preemptions": (("preemptions",), "", False),
    "host memory": (("peak_rss_mb",), "MB", False),
    "device memory": (("peak_device_mb",), "MB", False),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One configuration: a name, and the options of the command line that make it."""

    name: str
    options: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one process reported."""

    report: dict[str, Any]
    trace: Trace
    cold: bool  # nothing was in the compile cache


class RunFailed(RuntimeError):
    """A process that did not report; the message is its last line."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of one configuration over all rounds."""

    values: tuple[float, ...]
    interval: Interval
    versus: Contrast | None  # the first configuration; None for that itself


@dataclasses.dataclass(frozen=True)
class Result:
    """One configuration."""

    name: str
    config: str  # TOML, resolved
    device: str
    figures: dict[str, Figure]
    programs: int
    kv: dict[str, float]
    compile_s: dict[str, float | None]  # cold, warm
    startup_s: dict[str, float | None]
    buckets: dict[int, dict[str, float]]  # of a mean run
    unused: dict[str, float]  # steps by the reason why budget was left, of a mean run
    ttft_ms: list[float]  # quantiles over all rounds
    itl_ms: list[float]


@dataclasses.dataclass(frozen=True)
class Comparison:
    workload: str
    rounds: int
    main: str  # the figure that decides
    results: list[Result]
    failed: dict[str, str]  # configuration -> why
    verdicts: list[str]


def variants(configs: Sequence[Path], sweeps: Sequence[str]) -> list[Variant]:
    """Every config file with every combination of the swept values.

    Raises ValueError for a sweep that is not written `section.key=value,value`.
    """
    axes = [_axis(text) for text in sweeps]
    names = _distinct(configs)
    found: list[Variant] = []
    for path, name in zip(configs or [None], names or [""], strict=True):
        file = () if path is None else ("--config", str(path))
        for combination in itertools.product(*axes):
            parts = [name, *(text.partition(".")[2] for text in combination)]
            options = [("--set", text) for text in combination]
            title = " ".join(part for part in parts if part) or "default"
            found.append(Variant(title, (*file, *itertools.chain.from_iterable(options))))
    return found


def order(count: int, rounds: int) -> list[list[int]]:
    """Which configuration runs when: in each round all of them, every second round backwards and
    each pair of rounds begun one further on, so that each precedes and follows each other alike."""
    found: list[list[int]] = []
    for number in range(rounds):
        line = [(number // 2 + at) % count for at in range(count)]
        found.append(line[::-1] if number % 2 else line)
    return found


def measure(
    wanted: Sequence[Variant],
    rounds: int,
    run: Callable[[Variant, int], Run],
    notice: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Runs of each configuration, one a round, and those that failed with the reason."""
    runs: dict[str, list[Run]] = {variant.name: [] for variant in wanted}
    failed: dict[str, str] = {}
    for number, line in enumerate(order(len(wanted), rounds), 1):
        for at in line:
            variant = wanted[at]
            if variant.name in failed:
                continue
            try:
                found = run(variant, number)
            except RunFailed as error:
                failed[variant.name] = str(error)
                notice(f"round {number} of {rounds}: {variant.name} failed: {error}")
                continue
            runs[variant.name].append(found)
            speed = found.report["output_tokens_per_s"]
            notice(f"round {number} of {rounds}: {variant.name}: {speed:.1f} output tokens/s")
    return {name: found for name, found in runs.items() if name not in failed}, failed


def compare(
    workload: str, runs: dict[str, list[Run]], failed: dict[str, str], main: str
) -> Comparison:
    """`main`: the figure of FIGURES that decides; `runs`: of each configuration one a round."""
    names = list(runs)
    figures: dict[str, dict[str, Figure]] = {name: {} for name in names}
    for figure, (place, _, _) in FIGURES.items():
        values = {name: [_find(run.report, place) for run in runs[name]] for name in names}
        if figure == "host memory":  # of starts that compiled nothing, where there are such
            warm = {n: [_find(r.report, place) for r in runs[n] if not r.cold] for n in names}
            values = warm if all(warm.values()) else values
        known = {name: [v for v in found if v is not None] for name, found in values.items()}
        lengths = {len(found) for found in known.values()}
        if len(lengths) != 1 or not min(lengths):
            continue
        against = stats.contrasts(list(zip(*known.values(), strict=True)))
        for name, versus in zip(names, [None, *against], strict=True):
            own = known[name]
            figures[name][figure] = Figure(tuple(own), stats.interval(own), versus)
    results = [_result(name, runs[name], figures[name]) for name in names]
    rounds = max((len(found) for found in runs.values()), default=0)
    verdicts = [_verdict(result, names[0], main) for result in results[1:]]
    return Comparison(workload, rounds, main, results, failed, verdicts)


def _axis(text: str) -> list[str]:
    """`a.b=1,2` -> [`a.b=1`, `a.b=2`]; lists stand in brackets."""
    name, equals, values = text.partition("=")
    parts, depth = [""], 0
    for char in values:
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    if not equals or "." not in name or not all(part.strip() for part in parts):
        raise ValueError(f"--sweep {text}: write it as section.key=value,value")
    return [f"{name.strip()}={part.strip()}" for part in parts]


def _distinct(paths: Sequence[Path]) -> list[str]:
    """File names without their ends, or whole paths where those are the same."""
    names = [path.stem for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _find(report: dict[str, Any], place: tuple[str, ...]) -> float | None:
    found: Any = report
    for key in place:
        found = found.get(key) if isinstance(found, dict) else None
    return None if found is None else float(found)


def _result(name: str, runs: list[Run], figures: dict[str, Figure]) -> Result:
    first = runs[0]
    header = first.trace.header
    config = settings.loads(header.config)
    blocks, size = config.cache.num_blocks, config.cache.block_size
    longest = config.max_chunk, config.model.max_len
    tokens = context_tokens(first.trace.windows, blocks, size, *longest)
    kv: dict[str, float] = {"blocks": blocks, "tokens": tokens}
    if "kv_bytes" in header.facts:
        kv["gib"] = header.facts["kv_bytes"] / (1 << 30)
    reasons = {why for run in runs for why in run.report["budget_unused"]}
    return Result(
        name=name,
        config=header.config,
        device=header.device,
        figures=figures,
        programs=first.report["programs"],
        kv=kv,
        compile_s=_cold_and_warm(runs, lambda run: run.report["startup"].get("compile")),
        startup_s=_cold_and_warm(runs, lambda run: run.report["startup_s"]),
        buckets=_buckets([run.trace for run in runs]),
        unused={
            why: statistics.mean(run.report["budget_unused"].get(why, 0) for run in runs)
            for why in sorted(reasons)
        },
        ttft_ms=latency.curve([ms for run in runs for ms in latency.ttfts(run.trace)]),
        itl_ms=latency.curve([ms for run in runs for ms in latency.gaps(run.trace)]),
    )


def _cold_and_warm(runs: list[Run], of: Callable[[Run], float | None]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, cold in (("cold", True), ("warm", False)):
        values = [value for run in runs if run.cold is cold and (value := of(run)) is not None]
        found[name] = statistics.median(values) if values else None
    return found


def _buckets(traces: list[Trace]) -> dict[int, dict[str, float]]:
    """Steps, device seconds, and what padding takes of them and of the tokens, of a mean run."""
    found: dict[int, dict[str, float]] = {}
    for step in itertools.chain.from_iterable(t.steps for t in traces):
        entry = found.setdefault(
            step.bucket, dict.fromkeys(("steps", "device_s", "padding_s", "tokens", "padded"), 0.0)
        )
        entry["steps"] += 1
        entry["device_s"] += step.device / 1e6
        entry["padding_s"] += step.padding / 1e6
        entry["tokens"] += step.tokens
        entry["padded"] += step.bucket - step.tokens
    for entry in found.values():
        for key in list(entry):
            entry[key] /= len(traces)
        entry["time_waste"] = entry["padding_s"] / entry["device_s"] if entry["device_s"] else 0.0
        entry["token_waste"] = entry["padded"] / (entry["tokens"] + entry["padded"])
    return dict(sorted(found.items()))


def change_text(contrast: Contrast, unit: str = "") -> str:
    """+12.3% (+8.1% to +16.9%)."""

    def part(x: float) -> str:
        if not math.isfinite(x):
            return "?"
        return f"{x:+.1%}" if contrast.relative or unit == "%" else f"{x:+.3g}"

    return f"{part(contrast.change)} ({part(contrast.low)} to {part(contrast.high)})"


def _verdict(result: Result, first: str, main: str) -> str:
    """One sentence: better, worse, or noise."""
    figure = result.figures.get(main)
    if figure is None or figure.versus is None:
        return f"{result.name}: {main} was not measured in every run"
    versus, (_, unit, more) = figure.versus, FIGURES[main]
    text = change_text(versus, unit)
    if len(figure.values) < 2:
        return (
            f"{result.name}: {main} {text} against {first}, of one run each: that says nothing of "
            f"noise; repeat it"
        )
    if not versus.differs:
        return (
            f"{result.name}: {main} {text} against {first}: noise; {len(figure.values)} rounds "
            f"tell no difference"
        )
    better = "better" if (versus.change > 0) == more else "worse"
    return f"{result.name}: {main} {text} against {first}: {better}"


def load_run(report: str, path: Path, *, cold: bool) -> Run:
    """`report`: what bench printed with --json; `path`: its trace.

    Raises RunFailed when they are not there.
    """
    try:
        return Run(json.loads(report.splitlines()[-1]), trace.load(path), cold)
    except (IndexError, ValueError) as error:
        raise RunFailed(f"it printed no report: {error}") from error
