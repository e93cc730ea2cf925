"""A profile as a table file, as text and as one object."""

import dataclasses
from typing import Any

from jaxserve.costs import GROUPS, CostModel
from jaxserve.lab import fit
from jaxserve.lab.cost_table import CostTable
from jaxserve.lab.fit import Errors
from jaxserve.lab.profile import Profile


def table(found: Profile, model: str, facts: dict[str, Any]) -> CostTable:
    """What later starts load."""
    errors = {name: dataclasses.asdict(known) for name, known in error_rows(found).items()}
    off = found.held_out
    return CostTable(
        source=f"jaxserve lab profile, {found.rounds} rounds of {found.shapes} shapes, off by "
        f"{off.median:.1%} (median) and {off.p95:.1%} (P95)",
        device=str(facts["device"]),
        model=model,
        costs=found.costs,
        facts={"key": facts, "errors": errors},
    )


def as_object(found: Profile, table: CostTable) -> dict[str, Any]:
    return {
        "device": table.device,
        "model": table.model,
        "source": table.source,
        "seconds": found.seconds,
        "costs": dataclasses.asdict(found.costs),
        "errors": table.facts["errors"],
        "verdict": fit.verdict(found.held_out),
        "curves": {
            plot: {name: [dataclasses.asdict(point) for point in points] for name, points in s}
            for plot, s in ((plot, series.items()) for plot, series in found.curves.items())
        },
    }


def text(found: Profile, table: CostTable) -> str:
    lines = [f"{table.model} on {table.device}: {table.source}, {found.seconds:.0f} s", ""]
    lines += [f"{name:22}{value}" for name, value in cost_rows(found.costs)]
    lines += ["", f"{'error':22}{'median':>8}{'p95':>8}{'steps':>7}"]
    for name, known in error_rows(found).items():
        lines.append(f"{name:22}{known.median:8.1%}{known.p95:8.1%}{known.steps:7}")
    return "\n".join([*lines, "", judgement(found), ""])


def judgement(found: Profile) -> str:
    """A line on how good the table is, and what to do about it."""
    off, kind = found.held_out, fit.verdict(found.held_out)
    bound = fit.LIMIT if kind == "useless" else fit.AIM
    where = "within" if kind == "good" else "beyond"
    line = f"Held-out shapes are off by {off.median:.1%} (median) and {off.p95:.1%} (P95), {where} "
    name = "the limit" if kind == "useless" else "the aim"
    line += f"{name} of {bound.median:.0%} and {bound.p95:.0%}"
    if kind == "good":
        return f"{line}."
    means = "do not rely on this table" if kind == "useless" else "predictions are rough"
    return f"{line}: {means}; measure on an idle device, or for longer (--seconds)."


def cost_rows(costs: CostModel) -> list[tuple[str, str]]:
    """Name and value of every cost, for people."""
    rows = [
        (f"program[{size}]", f"{1e3 * seconds:.3f} ms")
        for size, seconds in zip(costs.tokens, costs.program, strict=True)
    ]
    for kind, seconds in costs.sampling.items():
        rows += [
            (f"{kind}[{size}]", f"{1e3 * one:.3f} ms")
            for size, one in zip(costs.rows, seconds, strict=True)
        ]
    terms = {
        "a decode": costs.single,
        "its context, 1000": 1e3 * costs.single_context,
        "a turn of 16 decodes": costs.turn + GROUPS[0] * costs.turn_row,
        "a chunk": costs.chunk,
        "its pairs, million": 1e6 * costs.chunk_pair,
        "filled up, million": 1e6 * costs.tile_pair,
        "host, a step": costs.host,
        "host, a row": costs.host_row,
    }
    return [*rows, *((name, f"{1e3 * seconds:.4g} ms") for name, seconds in terms.items())]


def error_rows(found: Profile) -> dict[str, Errors]:
    known = {
        "held-out shapes": found.held_out,
        "fitted shapes": found.fitted,
        "a single run": found.noise,
    }
    return known if found.service is None else known | {"steps of an engine": found.service}
