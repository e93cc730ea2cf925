"""What `lab tune` found, for people and as a configuration."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve import settings
from jaxserve.config import EngineConfig
from jaxserve.lab import compare_text
from jaxserve.lab.tune import OVERLOAD, Tuned

_SHOWN = 8  # of the simulated


def toml(config: EngineConfig, found: Tuned) -> str:
    """`config` with the choice put in."""
    options = [*found.choice.candidate.options, f"server.max_queue={found.overload.max_queue}"]
    return settings.dump(settings.assign(config, options))


def text(found: Tuned) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=110, highlight=False)
    console.print(_curve(found))
    limit = found.plan.bound
    if limit is None:
        console.print("No budget has full steps within the limit on a token.")
    else:
        console.print(f"Full steps keep the limit on a token up to a budget of {limit}.")
    console.print(_simulated(found))
    console.print(compare_text.text(found.measured, 110), markup=False, end="")
    candidate, checked = found.choice.candidate, found.overload
    console.print(f"Choice: {candidate.variant.name}: {found.choice.why}.")
    console.print(
        f"At {OVERLOAD:g} times its load ({checked.rate:.2f} requests/s), simulated: "
        f"{checked.unbounded:.2f} good requests/s with an endless queue, {checked.bounded:.2f} "
        f"with at most {checked.max_queue} waiting ({checked.refused:.0%} refused), against "
        f"{checked.calm:.2f} without overload."
    )
    lines = [*candidate.options, f"server.max_queue={checked.max_queue}"]
    console.print("\n" + "\n".join(f"--set {line}" for line in lines), markup=False)
    return buffer.getvalue()


def _curve(found: Tuned) -> Table:
    table = _table(
        "Full steps by cost: decodes of all seats and one chunk", "budget", "ms", "tok/s"
    )
    for point in found.plan.curve:
        table.add_row(str(point.budget), f"{point.step_ms:.1f}", f"{point.tokens_per_s:,.0f}")
    return table


def _simulated(found: Tuned) -> Table:
    names = ("budget", "seqs", "partials", "good req/s", "out tok/s", "TTFT P99 s", "ITL P99 ms")
    title = f"Simulated: the best of {len(found.plan.simulated)}"
    table = _table(title, *names)
    for one in found.plan.simulated[:_SHOWN]:
        c, report = one.candidate, one.report
        cells: list[Any] = [c.budget, c.seqs, c.partials]
        cells += [f"{report['goodput']['requests_per_s']:.2f}"]
        cells += [f"{report['output_tokens_per_s']:,.1f}", f"{report['ttft_s']['p99']:.2f}"]
        cells += [f"{report['itl_ms']['p99'] or 0:.0f}"]
        table.add_row(*map(str, cells))
    return table


def _table(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="right")
    return table
