"""`jaxserve lab doctor`: what is wrong with a recorded run."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from jaxserve.cli import common


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is wrong with a recorded run, and which setting to change",
        description=(
            "Reads a trace that --record wrote and names what is wrong: chunk too big, chunk too "
            "small, too many partial prefills and thrash, budget fine but time varies, prefix "
            "cache and chunks out of step, cancelled work not released. Exit code 0 also when "
            "something is."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a trace")
    parser.add_argument("--tpot-slo", type=float, metavar="MS", help="limit to judge by")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    common.check_above_zero(args, "tpot_slo")
    from jaxserve.lab import doctor, trace

    try:
        loaded = trace.load(args.run)
        findings = doctor.diagnose(loaded, tpot_ms=args.tpot_slo)
    except ValueError as error:
        raise common.UsageError(common.one_line(error)) from error
    if args.json:
        steps, requests = len(loaded.steps), len(loaded.requests)
        common.write_json(
            {
                "steps": steps,
                "requests": requests,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
        return common.DONE
    for finding in findings:
        common.write_out(f"{finding.name}\n  {finding.what}.\n  Turn: {finding.turn}.\n")
    if not findings:
        common.write_out(
            f"nothing stands out in {len(loaded.steps)} steps of {len(loaded.requests)} requests\n"
        )
    return common.DONE
