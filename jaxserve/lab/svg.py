"""Plots as SVG text whose colours come from the page's CSS: the same picture in light and dark.

Series have the classes s0, s1, ..., text and lines `ink` and `faint`.
"""

import html
import math
from collections.abc import Callable, Sequence

LEFT, RIGHT, TOP, BOTTOM = 150, 24, 12, 40  # margins in px
WIDTH = 860

type Format = Callable[[float], str]
type Points = Sequence[tuple[float, float]]


def dots(
    labels: Sequence[str],
    series: Sequence[Sequence[tuple[float, float, float] | None]],
    form: Format,
    what: str,
    names: Sequence[str] = (),
) -> str:
    """For every label a line, on it for every series a dot with its interval: (mean, low, high).

    A line at 0 is what is compared with.  `names`: of the series, for a picture without a page.
    """
    known = [x for one in series for point in one if point for x in point if math.isfinite(x)]
    low, high = min([0.0, *known]), max([0.0, *known])
    scale, ticks = _axis(low, high)
    step = 16 * len(series) + 14
    height = TOP + step * len(labels) + BOTTOM
    parts = _grid(ticks, scale, height, form)
    if names:
        parts += _legend(names, height + 8)
    zero = scale(0.0)
    parts.append(_line(zero, TOP, zero, height - BOTTOM, "zero"))
    for row, label in enumerate(labels):
        top = TOP + row * step
        parts.append(_text(LEFT - 10, top + step / 2, label, "end"))
        for number, points in enumerate(series):
            point = points[row]
            if point is None:
                continue
            y = top + 15 + 16 * number
            mean, start, end = (min(max(x, ticks[0]), ticks[-1]) for x in point)
            parts.append(_line(scale(start), y, scale(end), y, f"whisker s{number}"))
            title = f"{label}: {form(point[0])} ({form(point[1])} to {form(point[2])})"
            parts.append(
                f'<circle class="s{number}" cx="{scale(mean):.1f}" cy="{y:.1f}" r="5">'
                f"<title>{html.escape(title)}</title></circle>"
            )
    return _svg(height + 24 * bool(names), parts, what)


def curves(series: Sequence[Sequence[float]], form: Format, what: str) -> str:
    """Quantile curves: from the least value on the left to the greatest on the right."""
    high = max((max(points) for points in series if points), default=1.0)
    height = 260
    bottom = height - BOTTOM
    ticks = _ticks(0.0, high)
    parts: list[str] = []

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / (ticks[-1] or 1.0)

    def x(share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    for tick in ticks:
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "faint"))
        parts.append(_text(LEFT - 10, y(tick), form(tick), "end"))
    for percent in (0, 25, 50, 75, 90, 99):
        parts.append(_text(x(percent / 100), bottom + 18, f"p{percent}", "middle"))
    for number, points in enumerate(series):
        if points:
            last = len(points) - 1
            path = " ".join(
                f"{x(at / last if last else 0):.1f},{y(value):.1f}"
                for at, value in enumerate(points)
            )
            parts.append(f'<polyline class="curve s{number}" points="{path}"/>')
    return _svg(height, parts, what)


def lines(series: Sequence[tuple[Points, Points]], forms: tuple[Format, Format], what: str) -> str:
    """For every series dots, and a line through other points: what was measured, and a model of it.

    `forms`: of x and y.
    """
    xs = [x for dots, line in series for x, _ in (*dots, *line)]
    ys = [y for dots, line in series for _, y in (*dots, *line)]
    height = 300
    bottom = height - BOTTOM
    scale, ticks = _axis(0.0, max(xs, default=1.0))
    rows = _ticks(0.0, max(ys, default=1.0))

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / rows[-1]

    parts = _grid(ticks, scale, height, forms[0])
    for row in rows:
        parts.append(_line(LEFT, y(row), WIDTH - RIGHT, y(row), "faint"))
        parts.append(_text(LEFT - 10, y(row), forms[1](row), "end"))
    for number, (dots, line) in enumerate(series):
        path = " ".join(f"{scale(at):.1f},{y(value):.1f}" for at, value in line)
        parts.append(f'<polyline class="curve s{number}" points="{path}"/>')
        for at, value in dots:
            title = html.escape(f"{forms[0](at)}: {forms[1](value)}")
            place = f'cx="{scale(at):.1f}" cy="{y(value):.1f}"'
            parts.append(f'<circle class="s{number}" {place} r="4"><title>{title}</title></circle>')
    return _svg(height, parts, what)


def bars(
    labels: Sequence[str],
    series: Sequence[Sequence[float]],
    form: Format,
    what: str,
    hollow: Sequence[Sequence[float]] | None = None,
) -> str:
    """For every label a bar a series; `hollow`: the part at its end that is lost."""
    high = max((max(values, default=0.0) for values in series), default=0.0)
    scale, ticks = _axis(0.0, high or 1.0)
    step = 13 * len(series) + 12
    height = TOP + step * len(labels) + BOTTOM
    parts = _grid(ticks, scale, height, form)
    for row, label in enumerate(labels):
        top = TOP + row * step
        parts.append(_text(LEFT - 10, top + step / 2, label, "end"))
        for number, values in enumerate(series):
            value = values[row]
            lost = hollow[number][row] if hollow else 0.0
            y = top + 6 + 13 * number
            filled = scale(value - lost) - LEFT
            title = f"{label}: {form(value)}" + (f", of that {form(lost)} lost" if lost else "")
            parts.append(f"<g><title>{html.escape(title)}</title>")
            parts.append(_rectangle(LEFT, y, filled, f"s{number}"))
            if lost > 0:
                parts.append(
                    _rectangle(LEFT + filled, y, scale(value) - LEFT - filled, f"hollow s{number}")
                )
            parts.append("</g>")
    return _svg(height, parts, what)


def _legend(names: Sequence[str], y: float) -> list[str]:
    width = (WIDTH - LEFT - RIGHT) / len(names)
    parts: list[str] = []
    for number, name in enumerate(names):
        x = LEFT + number * width
        parts.append(f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(_text(x + 12, y, name, "start"))
    return parts


def _axis(low: float, high: float) -> tuple[Callable[[float], float], list[float]]:
    ticks = _ticks(low, high)
    span = ticks[-1] - ticks[0]
    width = WIDTH - LEFT - RIGHT
    return (lambda value: LEFT + width * (value - ticks[0]) / span), ticks


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose both."""
    span = (high - low) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * m for m in (1, 2, 5, 10) if span / (size * m) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _grid(
    ticks: list[float], scale: Callable[[float], float], height: float, form: Format
) -> list[str]:
    parts: list[str] = []
    for tick in ticks:
        parts.append(_line(scale(tick), TOP, scale(tick), height - BOTTOM, "faint"))
        parts.append(_text(scale(tick), height - BOTTOM + 18, form(tick), "middle"))
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{name}" {ends}/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text class="ink" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'dominant-baseline="middle">{html.escape(words)}</text>'
    )


def _rectangle(x: float, y: float, width: float, name: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="11"'
    return f'<rect class="{name}" {size}/>'


def _svg(height: float, parts: list[str], what: str) -> str:
    words = html.escape(what, quote=True)
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{words}">'
    return "\n".join([head, *parts, "</svg>"])
