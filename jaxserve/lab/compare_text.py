"""A comparison as tables for a terminal, and as one object."""

import dataclasses
import io
import math
from typing import Any

from jaxserve.lab.compare import FIGURES, Comparison, Figure, Result, change_text
from jaxserve.lab.stats import CONFIDENCE


def as_object(found: Comparison) -> dict[str, Any]:
    """For `--json`: everything, with whether each difference is more than noise."""
    whole = dataclasses.asdict(found)
    for result, entry in zip(found.results, whole["results"], strict=True):
        for name, figure in result.figures.items():
            _, unit, more = FIGURES[name]
            entry["figures"][name] |= {"unit": unit, "more_is_better": more}
            if figure.versus is not None:
                entry["figures"][name]["versus"]["differs"] = figure.versus.differs
    return {"confidence": CONFIDENCE, **whole}


def text(found: Comparison, width: int = 120) -> str:
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, highlight=False)
    if found.results:
        console.print(_figures(found))
        console.print(_facts(found))
        console.print(_buckets(found))
        console.print(_unused(found))
    for name, why in found.failed.items():
        console.print(f"{name} failed: {why}", markup=False)
    for sentence in found.verdicts:
        console.print(sentence, markup=False)
    return buffer.getvalue()


def _table(title: str, first: str, names: list[str]) -> Any:
    from rich.table import Table

    table = Table(title=title)
    table.add_column(first)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _names(found: Comparison) -> list[str]:
    return [result.name for result in found.results]


def _figures(found: Comparison) -> Any:
    title = (
        f"{found.workload}, {found.rounds} interleaved rounds; mean, and change against "
        f"{found.results[0].name} with {CONFIDENCE:.0%} interval (* more than noise)"
    )
    table = _table(title, "", _names(found))
    for name, (_, unit, _) in FIGURES.items():
        known = [result.figures.get(name) for result in found.results]
        if not any(known):
            continue
        style = "bold" if name == found.main else ""
        table.add_row(name, *(_cell(figure, unit) for figure in known), style=style)
    return table


def _cell(figure: Figure | None, unit: str) -> str:
    if figure is None:
        return "-"
    line = number(figure.interval.mean, unit)
    if figure.versus is None:
        half = figure.interval.high - figure.interval.mean
        return f"{line} ± {number(half, unit)}" if math.isfinite(half) else line
    mark = " *" if figure.versus.differs else ""
    return f"{line}\n{change_text(figure.versus, unit)}{mark}"


def number(value: float, unit: str) -> str:
    """With three or four digits that say something."""
    if unit == "%":
        return f"{value:.1%}"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{digits} {unit}".strip()


def facts(result: Result) -> dict[str, str]:
    """What does not vary between runs, or only by whether programs were cached."""

    def seconds(parts: dict[str, float | None]) -> str:
        known = [f"{name} {value:.1f} s" for name, value in parts.items() if value is not None]
        return ", ".join(known) or "-"

    kv = result.kv
    return {
        "programs": str(result.programs),
        "compile": seconds(result.compile_s),
        "start": seconds(result.startup_s),
        "KV pool": f"{kv['tokens']:,.0f} tokens"
        + (f", {kv['gib']:.2f} GiB" if "gib" in kv else ""),
    }


def _facts(found: Comparison) -> Any:
    table = _table("Fixed by the configuration", "", _names(found))
    rows = [facts(result) for result in found.results]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def _buckets(found: Comparison) -> Any:
    title = "Token buckets: steps of a mean run, time waste / token waste"
    table = _table(title, "bucket", _names(found))
    for bucket in sorted({bucket for result in found.results for bucket in result.buckets}):
        cells: list[str] = []
        for result in found.results:
            entry = result.buckets.get(bucket)
            cells.append(
                "-"
                if entry is None
                else f"{entry['steps']:.0f}  {entry['time_waste']:.1%} / {entry['token_waste']:.1%}"
            )
        table.add_row(str(bucket), *cells)
    return table


def _unused(found: Comparison) -> Any:
    table = _table("Steps that left budget, by the reason", "reason", _names(found))
    for why in sorted({why for result in found.results for why in result.unused}):
        table.add_row(why, *(f"{result.unused.get(why, 0):.0f}" for result in found.results))
    return table
