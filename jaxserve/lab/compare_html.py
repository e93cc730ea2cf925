"""A comparison as one HTML file: nothing is loaded from elsewhere, light and dark by the reader's
setting."""

import html
import math
from collections.abc import Sequence

from jaxserve.lab import svg
from jaxserve.lab.compare import FIGURES, Comparison, Figure, Result, change_text
from jaxserve.lab.compare_text import facts, number
from jaxserve.lab.stats import CONFIDENCE

_LIGHT = ("#1f6feb", "#c2410c", "#15803d", "#9333ea", "#b45309", "#0e7490", "#be185d", "#4d7c0f")
_DARK = ("#79b8ff", "#ffa266", "#6ee7a0", "#d2a8ff", "#f5cf6b", "#67e8f9", "#ff9ec6", "#c6e377")

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --soft: #57606a;
  --line: #d5dae0; --card: #f5f7f9; --good: #116329; --bad: #b42318; SERIES_LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --ink: #e6edf3; --soft: #9aa7b4; --line: #343d47; --card: #1a2028;
    --good: #6ee7a0; --bad: #ff9b93; SERIES_DARK }
}
body { margin: 0 auto; padding: 24px; max-width: 1000px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 6px 0; } .soft { color: var(--soft); }
.verdicts { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 16px; margin: 16px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
td small { display: block; color: var(--soft); }
td small.good { color: var(--good); font-weight: 600; }
td small.bad { color: var(--bad); font-weight: 600; }
tr.main td { background: var(--card); }
svg { display: block; width: 100%; height: auto; font-size: 12px; }
svg .ink { fill: var(--ink); } svg .faint { stroke: var(--line); stroke-width: 1; }
svg .zero { stroke: var(--soft); stroke-width: 1.5; }
svg .whisker { stroke-width: 2; } svg .curve { fill: none; stroke-width: 2; }
svg .hollow { fill-opacity: 0.25; stroke-width: 1; }
.legend span { display: inline-flex; align-items: center; margin-right: 18px; }
.legend i { width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  overflow-x: auto; font-size: 13px; }
"""


def page(found: Comparison) -> str:
    """The whole file."""
    results = found.results
    title = f"{found.workload}: {len(results)} configurations"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_style(len(results))}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">{html.escape(_about(found))}</p>',
        _verdicts(found),
    ]
    if results:
        parts += [_legend(found), _section("Figures", _figures(found))]
        if len(results) > 1:
            parts.append(
                _section(
                    f"Change against {results[0].name}, {CONFIDENCE:.0%} intervals", _changes(found)
                )
            )
        parts += [
            _section("Time to first token (quantiles)", _curves([r.ttft_ms for r in results])),
            _section("Gap between tokens (quantiles)", _curves([r.itl_ms for r in results])),
            _section("Device time by token bucket; pale: lost to padding", _bucket_bars(results)),
            _section("Steps that left budget, by the reason", _unused_bars(results)),
            _section("Fixed by the configuration", _facts(results)),
            _section("Buckets", _buckets(results)),
        ]
        parts += [_settings(result) for result in results]
    return "\n".join([*parts, "</body></html>", ""])


def picture(found: Comparison) -> str:
    """The changes against the first configuration as an SVG file of its own, for a document."""
    drawn = _changes(found, [result.name for result in found.results])
    style = f"<style>{_style(len(found.results))} svg {{ background: var(--page); }}</style>"
    head, end, rest = drawn.partition(">")
    space = ' xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif"'
    return f"{head}{space}{end}{style}{rest}\n"


def _style(count: int) -> str:
    rules = [
        f"svg .s{n}, .legend .s{n} {{ fill: var(--c{n}); stroke: var(--c{n}); "
        f"background: var(--c{n}); }}"
        for n in range(count)
    ]
    colours = [
        " ".join(f"--c{n}: {palette[n % len(palette)]};" for n in range(count))
        for palette in (_LIGHT, _DARK)
    ]
    style = _STYLE.replace("SERIES_LIGHT", colours[0]).replace("SERIES_DARK", colours[1])
    return style + "\n".join([*rules, "svg .curve { fill: none; }"])


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


def _section(title: str, inner: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{inner}"


def _table(head: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    """`rows`: the class of a row, and its cells."""
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f'<tr class="{name}">{cells}</tr>' for name, cells in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _cells(*words: str) -> str:
    return "".join(f"<td>{html.escape(word)}</td>" for word in words)


def _figures(found: Comparison) -> str:
    rows: list[tuple[str, str]] = []
    for name, (_, unit, more) in FIGURES.items():
        figures = [result.figures.get(name) for result in found.results]
        if any(figures):
            inner = "".join(_figure(figure, unit, more) for figure in figures)
            rows.append(("main" if name == found.main else "", _cells(name) + inner))
    return _table(["", *(result.name for result in found.results)], rows)


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
    rows = [("", _cells(name, *(one[name] for one in known))) for name in known[0]]
    return _table(["", *(result.name for result in results)], rows)


def _buckets(results: Sequence[Result]) -> str:
    head = ["bucket", *(f"{r.name}: steps, time waste, token waste" for r in results)]
    rows: list[tuple[str, str]] = []
    for size in sorted({size for result in results for size in result.buckets}):
        cells = [str(size)]
        for result in results:
            e = result.buckets.get(size)
            cells.append(
                f"{e['steps']:.0f}, {e['time_waste']:.1%}, {e['token_waste']:.1%}" if e else "-"
            )
        rows.append(("", _cells(*cells)))
    return _table(head, rows)


def _settings(result: Result) -> str:
    name = html.escape(result.name)
    text = html.escape(result.config)
    return f"<details><summary>Settings of {name}</summary><pre>{text}</pre></details>"
