"""`jaxserve batch status`: how a job is doing, from another terminal."""

import argparse
import time
from typing import Any

from jaxserve.cli import common

WATCH_SECONDS = 1.0


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch status",
        description=(
            "Says how the job that writes OUTPUT is doing, from the status file beside it: "
            "running, parked, done, failed, dead (its process is gone) or silent (not heard of for "
            "a minute). Exit code 0 whenever there is a job to tell of."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("output", metavar="OUTPUT", help="the --output of the job")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument(
        "--watch", action="store_true", help="again every second until the job ends"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Raises UsageError when there is no job."""
    from jaxserve.offline import places, status
    from jaxserve.offline.output import Layout

    storage, path = places.storage_of(args.output)
    folder = Layout(path).folder
    while True:
        try:
            found = status.read(storage, folder)
        except OSError as error:
            raise common.UsageError(
                f"no job is known for {args.output}: {common.one_line(error)}"
            ) from error
        except ValueError as error:
            raise common.UsageError(common.one_line(error)) from error
        now = time.time()
        state = status.judge(found, now)
        if args.json:
            import msgspec

            common.write_json(msgspec.to_builtins(found) | {"state": state})
        else:
            common.write_out(status.describe(found, state, now) + "\n")
        if not args.watch or state not in ("running", "silent"):
            return common.DONE
        time.sleep(WATCH_SECONDS)
