"""What the lab's pages share: one HTML file that loads nothing, light and dark by the reader's
setting."""

import html
from collections.abc import Sequence

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


def whole(title: str, parts: Sequence[str], series: int) -> str:
    """A whole file; `series`: how many colours its pictures take."""
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{style(series)}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    return "\n".join([*head, *parts, "</body></html>", ""])


def style(count: int) -> str:
    rules = [
        f"svg .s{n}, .legend .s{n} {{ fill: var(--c{n}); stroke: var(--c{n}); "
        f"background: var(--c{n}); }}"
        for n in range(count)
    ]
    colours = [
        " ".join(f"--c{n}: {palette[n % len(palette)]};" for n in range(count))
        for palette in (_LIGHT, _DARK)
    ]
    text = _STYLE.replace("SERIES_LIGHT", colours[0]).replace("SERIES_DARK", colours[1])
    return text + "\n".join([*rules, "svg .curve { fill: none; }"])


def section(title: str, inner: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{inner}"


def table(head: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    """`rows`: the class of a row, and its cells."""
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f'<tr class="{name}">{cells}</tr>' for name, cells in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def cells(*words: str) -> str:
    return "".join(f"<td>{html.escape(word)}</td>" for word in words)
