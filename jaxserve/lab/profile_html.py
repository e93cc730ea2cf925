"""A profile as one HTML file: dots are measured, lines are what the cost model predicts."""

import html

from jaxserve.lab import page_parts, svg
from jaxserve.lab.cost_table import CostTable
from jaxserve.lab.page_parts import cells, section
from jaxserve.lab.profile import Point, Profile
from jaxserve.lab.profile_text import cost_rows, error_rows, judgement

_AXES = {
    "T(bucket)": "Device time of a step against its bucket",
    "T_decode(context)": "Decodes: device time against the context of each row",
    "T_prefill(prefix)": "Chunks: device time against the tokens before them",
    "T_mixed(decodes)": "Mixed steps of a size: device time against the decodes in it",
    "T_sample(rows)": "Decodes of one token, by rows and sampler",
}


def page(found: Profile, table: CostTable) -> str:
    """The whole file."""
    words = f"{table.device}. {table.source}, {found.seconds:.0f} s. Dots: measured; lines: model."
    parts = [f'<p class="soft">{html.escape(words)}</p>', section("Error", _errors(found))]
    for plot, series in found.curves.items():
        parts.append(section(_AXES[plot], _legend(list(series)) + _curves(series)))
    parts.append(
        section("Shapes that were not fitted: predicted milliseconds, and measured", _pairs(found))
    )
    rows = [("", cells(name, value)) for name, value in cost_rows(found.costs)]
    parts.append(section("The cost model", page_parts.table(["", "cost"], rows)))
    return page_parts.whole(f"What steps of {table.model} cost", parts, _most_series(found))


def _most_series(found: Profile) -> int:
    return max(len(series) for series in found.curves.values())


def _errors(found: Profile) -> str:
    rows = [
        ("", cells(name, f"{known.median:.1%}", f"{known.p95:.1%}", str(known.steps)))
        for name, known in error_rows(found).items()
    ]
    words = f"<p>{html.escape(judgement(found))}</p>"
    return page_parts.table(["", "median", "p95", "steps"], rows) + words


def _legend(names: list[str]) -> str:
    spans = [f'<span><i class="s{n}"></i>{html.escape(x)}</span>' for n, x in enumerate(names)]
    return f'<p class="legend">{"".join(spans)}</p>'


def _curves(series: dict[str, list[Point]]) -> str:
    drawn = [
        ([(p.x, 1e3 * p.seconds) for p in points], [(p.x, 1e3 * p.predicted) for p in points])
        for points in series.values()
    ]
    return svg.lines(drawn, ("{:,.0f}".format, "{:,.4g} ms".format), "measured and predicted")


def _pairs(found: Profile) -> str:
    pairs = [(1e3 * a, 1e3 * b) for a, b in found.pairs]
    most = max(max(pair) for pair in pairs)
    words = "measured against predicted milliseconds; on the line they are equal"
    forms = ("{:,.0f}".format, "{:,.4g} ms".format)
    return svg.lines([(pairs, [(0.0, 0.0), (most, most)])], forms, words)
