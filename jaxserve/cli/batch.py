"""`jaxserve batch`: every line of the input gets one result, however often the job is killed."""

import argparse
import math
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from jaxserve.cli import batch_ray, common, recording
from jaxserve.cli.batch_run import LEARNED, Outcome, Work, run_engine
from jaxserve.offline import shard
from jaxserve.offline.stop import GRACE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from jaxserve.config import EngineConfig
    from jaxserve.offline.files import JobFiles
    from jaxserve.offline.output import Layout
    from jaxserve.offline.stop import StopSignals
    from jaxserve.request import SamplingParams

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch",
        help="run a JSONL file of requests",
        description=(
            "Runs every line of INPUT and writes one result a line to --output, as each finishes. "
            "Run the same command again after anything that stopped it: it goes on where it was. "
            "Lines are OpenAI batch objects, or plain objects with prompt, prompt_token_ids or "
            "messages beside sampling options. Sampling options given here hold for lines that "
            "do not name them.  Exit codes: 0 all done, 1 some lines failed, 2 refused, 75 stopped "
            "early (run it again).  `jaxserve batch status OUTPUT` tells how a job is doing, "
            "`jaxserve batch merge` joins shards; both have a --help of their own."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="JSONL files of requests: paths, patterns in quotes, gs:// or s3:// addresses, also "
        ".gz and .zst; - is standard input",
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="results go here; .gz and .zst compress"
    )
    parser.add_argument("--token-ids", action="store_true", help="results name their token ids")
    parser.add_argument(
        "--any-model",
        action="store_true",
        help="lines may name another model and get this one; otherwise they fail",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one object")
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="X",
        help="of this machine; the summary has the cost",
    )
    _add_order_options(parser)
    _add_resume_options(parser)
    recording.add_options(parser)
    common.add_sampling_options(parser)
    common.add_engine_options(parser)
    common.add_deadline_options(parser)
    parser.set_defaults(func=run)


def _add_order_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("order and machines")
    group.add_argument(
        "--in-order",
        action="store_true",
        help="start lines in the order of INPUT, not in the order that is fastest",
    )
    group.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="run only every N-th line, from line I on (counted from 0); `batch merge` joins them",
    )
    batch_ray.add_options(group)


def _add_resume_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("going on")
    again = group.add_mutually_exclusive_group()
    again.add_argument(
        "--restart", action="store_true", help="begin anew; an output that exists is set aside"
    )
    again.add_argument(
        "--accept-changes",
        action="store_true",
        help="go on although input or settings are not those the output was begun with",
    )
    group.add_argument(
        "--retry-errors",
        action="store_true",
        help="redo the lines that failed for a reason outside of them",
    )
    group.add_argument(
        "--max-errors", type=int, metavar="N", help="stop when more lines than this fail in a run"
    )
    group.add_argument(
        "--sync-interval",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="most work that a power loss can undo; default 5",
    )
    group.add_argument(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help=f"time for requests in flight after SIGTERM or Ctrl-C; default {GRACE_SECONDS:g}",
    )
    group.add_argument(
        "--roll-size",
        type=_size,
        metavar="SIZE",
        help="write parts of about this size (FILE-00001, ...), such as 512M",
    )


def run(args: argparse.Namespace) -> int:
    from jaxserve.offline.errors import InputError
    from jaxserve.offline.stop import Interrupted, StopSignals

    _check_numbers(args)
    batch_ray.check(args)
    recording.check(args)
    config = common.read_config(args)
    defaults = common.read_sampling(args)
    try:
        with StopSignals(args.grace) as stop:
            return _run(args, config, defaults, stop)
    except InputError as error:
        raise common.UsageError(str(error)) from error
    except (Interrupted, KeyboardInterrupt):
        return common.PARKED


def _run(
    args: argparse.Namespace,
    config: "EngineConfig",
    defaults: "SamplingParams",
    stop: "StopSignals",
) -> int:
    from jaxserve.offline import lock, places
    from jaxserve.offline.files import JobFiles

    from_stdin = args.inputs == [places.STANDARD_INPUT]
    given = [] if from_stdin else places.find_inputs(args.inputs, args.output)
    storage, layout = places.find_output(args.output, given, rolled=args.roll_size is not None)
    settings = _settings(args, config, defaults, layout)

    try:
        files = JobFiles(storage, layout, lock.take, common.note)
    except OSError as error:
        return _refused(error, f"--output {args.output} cannot be written: ")
    try:
        return _run_locked(args, config, defaults, files, given, settings, stop)
    finally:
        files.close()


def _refused(error: OSError, what: str = "") -> int:
    """The exit code of a job whose files cannot be used."""
    from jaxserve.offline.storage import may_work_later

    message = f"{what}{common.one_line(error)}"
    if not may_work_later(error):
        raise common.UsageError(message) from error
    common.note(f"error: {message}; what is done is kept, run it again to go on")
    return common.PARKED


def _run_locked(  # noqa: PLR0913
    args: argparse.Namespace,
    config: "EngineConfig",
    defaults: "SamplingParams",
    files: "JobFiles",
    given: list[Any],
    settings: dict[str, Any],
    stop: "StopSignals",
) -> int:
    from jaxserve.offline import places
    from jaxserve.offline.files import Wishes
    from jaxserve.offline.inputs import Input
    from jaxserve.offline.report import cost

    try:
        wishes = Wishes(args.restart, args.accept_changes, args.retry_errors)
        anew = args.restart or args.accept_changes
        source = Input(given) if given else places.spool(files, _stdin(), anew=anew)
        later = [LEARNED] if config.model.dtype == "auto" else []
        files.prepare(source, settings, wishes, later)
        work = Work(args, config, defaults, files, source)
        nothing_left = work.num_lines and not work.num_left
        if nothing_left:
            files.settle()
    except OSError as error:
        return _refused(error)
    done_before, failed_before = work.num_before
    started = time.monotonic()
    outcome = Outcome()
    if nothing_left:
        _correct_status(work)
    else:
        _tell_what_is_left(work)
        outcome = run_engine(work, stop)
    totals = outcome.totals
    finished = done_before + failed_before + totals.done + totals.failed
    startup = time.monotonic() - started - outcome.seconds
    report = {
        "lines": work.num_lines,
        **totals.report(outcome.seconds),
        **outcome.use.figures(outcome.seconds),
        "done": done_before + totals.done,
        "failed": failed_before + totals.failed,
        "done_before": done_before,
        "failed_before": failed_before,
        "retried": work.num_retried,
        "redone": outcome.redone,
        "startup_s": startup,
        "interrupted": finished < work.num_lines,
        "model": config.model.name,
        "output": args.output,
    }
    if args.price_per_hour is not None:
        seconds = outcome.seconds + startup
        report |= cost(seconds, args.price_per_hour, totals.output_tokens)
    _show(report, as_json=args.json)
    if outcome.code is not None:
        return outcome.code
    if finished < work.num_lines:
        return common.PARKED
    return common.SOME_FAILED if report["failed"] else common.DONE


def _tell_what_is_left(work: Work) -> None:
    """The progress of a run counts from 0."""
    if sum(work.num_before) or work.num_retried:
        again = f", {work.num_retried} of them again" if work.num_retried else ""
        common.note(
            f"going on: {sum(work.num_before)} of {work.num_lines} lines have results, "
            f"{work.num_left} are to be run{again}"
        )


def _correct_status(work: Work) -> None:
    """Nothing is left to run, but a run that was killed behind its last result did not say so."""
    from jaxserve.offline import status

    try:
        found = status.read(work.files.storage, work.files.layout.folder)
    except (OSError, ValueError):
        return
    if found.state != "done":
        work.status_file().end("done")


def _shard(text: str) -> shard.Shard:
    try:
        return shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size(text: str) -> int:
    """Bytes: 512M -> 536870912."""
    found = _SIZE.fullmatch(text.strip())
    value = int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 512M")
    return value


def _settings(
    args: argparse.Namespace,
    config: "EngineConfig",
    defaults: "SamplingParams",
    layout: "Layout",
) -> dict[str, Any]:
    """What the results depend on; refused here are an unreadable model and an output that is a
    file of the model."""
    from jaxserve.offline import places
    from jaxserve.offline.fingerprint import settings_of

    try:
        model = _model_path(config)
        places.check_apart(layout, model)
        settings = settings_of(config, defaults, model, common.version())
    except (ValueError, OSError) as error:
        raise common.UsageError(common.one_line(error)) from error
    return {
        **settings,
        "--token-ids": args.token_ids,
        "--any-model": args.any_model,
        "--shard": shard.name(args.shard),
    }


def _model_path(config: "EngineConfig") -> "Path":
    from jaxserve import sources

    return sources.resolve(config.model.name)


def _stdin() -> Any:
    return sys.stdin.buffer


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("sync_interval", "grace"):
        value = getattr(args, name)
        if not 0 <= value < math.inf:
            raise common.UsageError(f"--{name.replace('_', '-')} {value} must be at least 0")
    price = args.price_per_hour
    if price is not None and not 0 <= price < math.inf:
        raise common.UsageError(f"--price-per-hour {price} must be at least 0")
    if args.max_errors is not None and args.max_errors < 0:
        raise common.UsageError(f"--max-errors {args.max_errors} must be at least 0")


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        common.write_json(report)
        return
    before = report["done_before"] + report["failed_before"]
    common.note(
        f"{report['done']} done, {report['failed']} failed of {report['lines']} lines"
        f"{f' ({before} of them before)' if before else ''} in "
        f"{report['wall_s']:.1f} s (start {report['startup_s']:.1f} s); "
        f"{report['output_tokens']} tokens, {report['output_tokens_per_s']:.0f} tok/s; "
        f"idle {report['idle_share']:.1%}, padding {report['time_waste']:.1%}; "
        f"results in {report['output']}"
    )
    if "cost" in report:
        common.note(f"cost {report['cost']:.4f} at {report['price_per_hour']:g} an hour")
    if report["interrupted"]:
        left = report["lines"] - report["done"] - report["failed"]
        common.note(f"stopped early: {left} lines are left; run the same command again to go on")
