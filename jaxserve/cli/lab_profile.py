"""`jaxserve lab profile`: what steps cost on the device that is here."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.build import Assembly
    from jaxserve.lab.cost_table import CostTable
    from jaxserve.lab.profile import Profile
    from jaxserve.metrics import StepRecord


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="measure what steps cost, and keep it for later starts",
        description=(
            "Runs made-up steps of many shapes on this device, fits the cost model to them, says "
            "how well it predicts steps that were not fitted, and keeps the table beside the "
            "compile cache: later starts with the same model, device, versions and programs load "
            "it. Costs serve scheduler.mode=time, snapping, `lab suggest` and `lab simulate`. "
            "A table that is far off there (README has the bounds) is not kept, and the exit code "
            "is 1."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=90.0,
        metavar="S",
        help="to measure for, at least three rounds; default 90",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table there as well")
    keep = parser.add_mutually_exclusive_group()
    keep.add_argument("--no-keep", action="store_true", help="not beside the compile cache")
    keep.add_argument(
        "--keep-anyway", action="store_true", help="keep it however far off predictions are"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with plots")
    parser.add_argument("--json", action="store_true", help="print one object")
    common.add_engine_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    common.check_above_zero(args, "seconds")
    common.check_folders(args, "output", "html")
    config = common.read_config(args)
    records: list[StepRecord] = []
    assembly = common.assemble(config, args, on_step=records.append)
    try:
        found, table = _measure(args, assembly, records)
        refused = _is_refused(args, found)
        _save(args.output, table)
        _save(None if args.no_keep or refused else assembly.cost_file, table)
    finally:
        assembly.close()
    _show(args, found, table)
    return common.SOME_FAILED if refused else common.DONE


def _measure(
    args: argparse.Namespace, assembly: "Assembly", records: "list[StepRecord]"
) -> "tuple[Profile, CostTable]":
    from jaxserve.lab import profile_text
    from jaxserve.lab.profile import Target, profile

    target = Target(assembly.config, assembly.runner, assembly.engine, records)
    assembly.runner.touch_kv()
    try:
        found = profile(target, args.seconds, note=common.note)
    except ValueError as error:
        raise common.UsageError(common.one_line(error)) from error
    return found, profile_text.table(found, assembly.config.model.name, assembly.cost_facts)


def _is_refused(args: argparse.Namespace, found: "Profile") -> bool:
    """Whether the table is too bad for later starts to load, which is then said.  A file that
    --output names is written all the same."""
    from jaxserve.lab import fit, profile_text

    if args.no_keep or args.keep_anyway or fit.verdict(found.held_out) != "useless":
        return False
    common.note(
        f"not kept: {profile_text.judgement(found)} What was kept before stays; "
        f"--keep-anyway keeps this one"
    )
    return True


def _save(place: Path | None, table: "CostTable") -> None:
    from jaxserve.lab import cost_table

    if place is None:
        return
    try:
        cost_table.save(place, table)
        common.note(f"the table is in {place}")
    except OSError as error:
        raise common.UsageError(f"{place}: {error.strerror or error}") from error


def _show(args: argparse.Namespace, found: "Profile", table: "CostTable") -> None:
    from jaxserve.lab import profile_html, profile_text

    if args.html is not None:
        args.html.write_text(profile_html.page(found, table), encoding="utf-8")
    if args.json:
        common.write_json(profile_text.as_object(found, table))
    else:
        common.write_out(profile_text.text(found, table))
