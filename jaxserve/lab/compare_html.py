"""A comparison as one HTML file: nothing is loaded from elsewhere, light and dark by the reader's
setting."""

import html
import math
from collections.abc import Sequence

from jaxserve.lab import page_parts, svg
from jaxserve.lab.compare import FIGURES, Comparison, Figure, Result, change_text
from jaxserve.lab.compare_text import facts, number
from jaxserve.lab.page_parts import cells, section, table
from jaxserve.lab.stats import CONFIDENCE


def page(found: Comparison) -> str:
    """The whole file."""
    results = found.results
    title = f"{found.workload}: {len(results)} configurations"
    parts = [f'<p class="soft">{html.escape(_about(found))}</p>', _verdicts(found)]
    if results:
        parts += [_legend(found), section("Figures", _figures(found))]
        if len(results) > 1:
            parts.append(
                section(
                    f"Change against {results[0].name}, {CONFIDENCE:.0%} intervals", _changes(found)
                )
            )
        parts += [
            section("Time to first token (quantiles)", _curves([r.ttft_ms for r in results])),
            section("Gap between tokens (quantiles)", _curves([r.itl_ms for r in results])),
            section("Device time by token bucket; pale: lost to padding", _bucket_bars(results)),
            section("Steps that left budget, by the reason", _unused_bars(results)),
            section("Fixed by the configuration", _facts(results)),
            section("Buckets", _buckets(results)),
        ]
        parts += [_settings(result) for result in results]
    return page_parts.whole(title, parts, len(results))


def picture(found: Comparison) -> str:
    """The changes against the first configuration as an SVG file of its own, for a document."""
    drawn = _changes(found, [result.name for result in found.results])
    style = (
        f"<style>{page_parts.style(len(found.results))} svg {{ background: var(--page); }}</style>"
    )
    head, end, rest = drawn.partition(">")
    space = ' xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif"'
    return f"{head}{space}{end}{style}{rest}\n"


def _about(found: Comparison) -> str:
    device = found.results[0].device if found.results else "no run succeeded"
    return (
        f"{device}; {found.rounds} rounds, interleaved, each run in a process of its own. "
        f"Intervals: {CONFIDENCE:.0%}, noise estimated from all configurations and rounds "
        f"(blocked analysis of variance), joint over all configurations."
    )


def _verdicts(found: Comparison) -> str:
    lines = [*found.verdicts, *(f"{name} failed: {why}" for name, why in found.failed.items())]
    inner = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f'<div class="verdicts">{inner}</div>' if lines else ""


def _legend(found: Comparison) -> str:
    spans = [
        f'<span><i class="s{n}"></i>{html.escape(result.name)}</span>'
        for n, result in enumerate(found.results)
    ]
    return f'<p class="legend">{"".join(spans)}</p>'


def _figures(found: Comparison) -> str:
    rows: list[tuple[str, str]] = []
    for name, (_, unit, more) in FIGURES.items():
        figures = [result.figures.get(name) for result in found.results]
        if any(figures):
            inner = "".join(_figure(figure, unit, more) for figure in figures)
            rows.append(("main" if name == found.main else "", cells(name) + inner))
    return table(["", *(result.name for result in found.results)], rows)


def _figure(figure: Figure | None, unit: str, more: bool) -> str:
    if figure is None:
        return "<td>-</td>"
    line = html.escape(number(figure.interval.mean, unit))
    versus = figure.versus
    if versus is None:
        half = figure.interval.high - figure.interval.mean
        note = f"<small>± {html.escape(number(half, unit))}</small>" if math.isfinite(half) else ""
        return f"<td>{line}{note}</td>"
    name = "" if not versus.differs else "good" if (versus.change > 0) == more else "bad"
    words = html.escape(change_text(versus, unit)) + ("" if versus.differs else " noise")
    return f'<td>{line}<small class="{name}">{words}</small></td>'


def _changes(found: Comparison, legend: Sequence[str] = ()) -> str:
    """Ratios against the first configuration."""
    names = [
        name
        for name in FIGURES
        if all(
            (figure := result.figures.get(name)) is not None
            and figure.versus is not None
            and figure.versus.relative
            for result in found.results[1:]
        )
    ]
    series: list[list[tuple[float, float, float] | None]] = [[None] * len(names)]
    for result in found.results[1:]:
        contrasts = [result.figures[name].versus for name in names]
        series.append([(c.change, c.low, c.high) if c else None for c in contrasts])
    drawn = svg.dots(names, series, lambda x: f"{x:+.0%}", "change against the first", legend)
    return drawn if names else "<p>No figure is above 0 in every run.</p>"


def _curves(series: list[list[float]]) -> str:
    return svg.curves(series, lambda ms: f"{ms:,.4g} ms", "quantile curves, one a configuration")


def _bucket_bars(results: Sequence[Result]) -> str:
    sizes = sorted({size for result in results for size in result.buckets})

    def part(key: str) -> list[list[float]]:
        return [[r.buckets.get(size, {}).get(key, 0.0) for size in sizes] for r in results]

    labels = [f"{size} tokens" for size in sizes]
    form = "{:.3g} s".format
    return svg.bars(labels, part("device_s"), form, "device seconds by bucket", part("padding_s"))


def _unused_bars(results: Sequence[Result]) -> str:
    reasons = sorted({why for result in results for why in result.unused})
    if not reasons:
        return "<p>Every step used up its budget.</p>"
    series = [[result.unused.get(why, 0.0) for why in reasons] for result in results]
    return svg.bars(reasons, series, "{:.4g}".format, "steps by the reason why budget was left")


def _facts(results: Sequence[Result]) -> str:
    known = [facts(result) for result in results]
    rows = [("", cells(name, *(one[name] for one in known))) for name in known[0]]
    return table(["", *(result.name for result in results)], rows)


def _buckets(results: Sequence[Result]) -> str:
    head = ["bucket", *(f"{r.name}: steps, time waste, token waste" for r in results)]
    rows: list[tuple[str, str]] = []
    for size in sorted({size for result in results for size in result.buckets}):
        words = [str(size)]
        for result in results:
            e = result.buckets.get(size)
            words.append(
                f"{e['steps']:.0f}, {e['time_waste']:.1%}, {e['token_waste']:.1%}" if e else "-"
            )
        rows.append(("", cells(*words)))
    return table(head, rows)


def _settings(result: Result) -> str:
    name = html.escape(result.name)
    text = html.escape(result.config)
    return f"<details><summary>Settings of {name}</summary><pre>{text}</pre></details>"
