"""--record and --trace-out: what the commands that run an engine share."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.build import Assembly

_FILES = ("record", "trace_out")


def add_options(parser: Any) -> None:
    group = parser.add_argument_group("recording")
    group.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write what every step did, for `jaxserve lab suggest` and `lab doctor`",
    )
    group.add_argument(
        "--trace-out",
        type=Path,
        metavar="FILE",
        help="write a timeline of steps, requests and queues for ui.perfetto.dev (.json, .json.gz)",
    )


def check(args: argparse.Namespace) -> None:
    """Raises UsageError."""
    common.check_folders(args, *_FILES)


def during(
    args: argparse.Namespace, assembly: "Assembly"
) -> contextlib.AbstractContextManager[None]:
    """Records while the block runs, if that was asked for."""
    if all(getattr(args, name) is None for name in _FILES):
        return contextlib.nullcontext()
    from jaxserve.lab.record import recording_of

    return recording_of(assembly, args.record, args.trace_out)


def last_of(
    args: argparse.Namespace, assembly: "Assembly", is_last: bool
) -> contextlib.AbstractContextManager[None]:
    """Of several runs the last one is recorded."""
    return during(args, assembly) if is_last else contextlib.nullcontext()
