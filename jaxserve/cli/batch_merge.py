"""`jaxserve batch merge`: the outputs of all shards, checked and put in the order of the input."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.cli import common

SHOWN = 10  # lines named in a message; --json names all


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch merge",
        description=(
            "Checks that the outputs of a job's shards hold every line of INPUT exactly once and "
            "writes them to --output, at once and in the order of INPUT. Exit codes: 0 complete, "
            "1 complete but some lines failed, 2 doubled results or results of another input, "
            "75 lines are missing (finish their shards and merge again). With 2 and 75 nothing is "
            "written."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "input", metavar="INPUT", help="the whole input of the job; may be a pattern"
    )
    parser.add_argument(
        "--more-input",
        action="append",
        default=[],
        metavar="INPUT",
        help="the next input of a job of several, in the order the job was given them; may be "
        "repeated",
    )
    parser.add_argument(
        "outputs",
        nargs="+",
        metavar="SHARD_OUTPUT",
        help="the --output of each shard, or its parts; may be patterns",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the merged results go here"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    parser.add_argument("--json", action="store_true", help="print the report as one object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from jaxserve.offline import places
    from jaxserve.offline.errors import InputError
    from jaxserve.offline.inputs import Input
    from jaxserve.offline.merge import merge

    if args.output.exists() and not args.overwrite:
        raise common.UsageError(
            f"--output {args.output} exists; name another file or add --overwrite"
        )
    try:
        given = places.find_inputs([args.input, *args.more_input])
        outputs = places.find_inputs(args.outputs)
        places.find_output(str(args.output), given, rolled=False)
        places.find_output(str(args.output), outputs, rolled=False)
        report = merge(Input(given).lines(), outputs, args.output)
    except InputError as error:
        raise common.UsageError(str(error)) from error
    except OSError as error:
        common.note(f"error: {common.one_line(error)}")
        return common.SOME_FAILED
    if args.json:
        import msgspec

        common.write_json(msgspec.to_builtins(report._asdict()) | {"complete": report.is_complete})
    for what in ("doubled", "foreign", "missing", "failed"):
        _name(what, getattr(report, what))
    written = f"written to {args.output}" if report.is_complete else "nothing was written"
    common.note(
        f"{report.done} done, {len(report.failed)} failed of {report.lines} lines; {written}"
    )
    if report.doubled or report.foreign:
        return common.BAD_USAGE
    if report.missing:
        return common.PARKED
    return common.SOME_FAILED if report.failed else common.DONE


def _name(what: str, lines: Sequence[object]) -> None:
    if lines:
        shown = ", ".join(map(str, lines[:SHOWN]))
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        common.note(f"{len(lines)} {_WORDS[what]}: {shown}{more}")


_WORDS = {
    "doubled": "lines have more than one result",
    "foreign": "results belong to no line of this input",
    "missing": "lines have no result",
    "failed": "lines failed",
}
