"""`jaxserve batch`: every line of a JSONL file, and a file of results."""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common
from jaxserve.offline import shard

if TYPE_CHECKING:
    from jaxserve.build import Assembly
    from jaxserve.offline.job import JobOptions, Totals
    from jaxserve.offline.report import EngineUse
    from jaxserve.offline.status import StatusFile


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "batch",
        help="run a JSONL file of requests",
        description=(
            "Runs every line of INPUT and writes one result a line to --output, as each finishes. "
            "Lines are OpenAI batch objects, or plain objects with prompt, prompt_token_ids or "
            "messages beside sampling options. Sampling options given here hold for lines that "
            "do not name them."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("input", type=Path, metavar="INPUT", help="JSONL file of requests")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="results go here"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    parser.add_argument("--token-ids", action="store_true", help="results name their token ids")
    parser.add_argument(
        "--any-model",
        action="store_true",
        help="lines may name another model and get this one; otherwise they fail",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one object")
    parser.add_argument(
        "--in-order",
        action="store_true",
        help="start lines in the order of INPUT, not in the order that is fastest",
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="run only every N-th line, from line I on (I counts from 0); see: jaxserve batch merge",
    )
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="X",
        help="of this machine; the summary has the cost",
    )
    common.add_sampling_options(parser)
    common.add_engine_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from jaxserve.offline import reader
    from jaxserve.offline.writer import InputError, check_paths

    config = common.read_config(args)
    common.read_sampling(args)
    price = args.price_per_hour
    if price is not None and not 0 <= price < float("inf"):
        raise common.UsageError(f"--price-per-hour {price} must be a number of at least 0")
    try:
        check_paths(args.input, args.output, overwrite=args.overwrite)
        total = shard.size(args.shard, reader.scan(args.input))
    except InputError as error:
        raise common.UsageError(str(error)) from error

    from jaxserve.offline import report
    from jaxserve.offline.job import JobOptions, Totals
    from jaxserve.offline.status import StatusFile

    start = time.monotonic()
    assembly = common.assemble(config, args)
    begun = time.monotonic()
    facts = {"model": assembly.config.model.name, "shard": shard.name(args.shard)}
    run = _Run(StatusFile(args.output, total, **facts), Totals(), report.EngineUse())
    options = JobOptions(token_ids=args.token_ids, in_order=args.in_order)
    try:
        stopped = _run_job(args, assembly, options, run, total)
        run.state = "done" if stopped is None else run.state
    finally:
        run.status.end(run.state)
        assembly.close()
    seconds = time.monotonic() - begun
    totals = run.totals
    summary = {
        "lines": total,
        **totals.report(seconds),
        **run.use.figures(seconds),
        "startup_s": begun - start,
        "interrupted": stopped is not None,
        "model": assembly.config.model.name,
        "output": str(args.output),
    }
    if price is not None:
        summary |= report.cost(seconds + begun - start, price, totals.output_tokens)
    _show(summary, as_json=args.json)
    if stopped is not None:
        return stopped
    return common.SOME_FAILED if totals.failed else common.DONE


def _shard(text: str) -> shard.Shard:
    try:
        return shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclasses.dataclass(slots=True)
class _Run:
    """What is left of a job, however it ended."""

    status: "StatusFile"
    totals: "Totals"
    use: "EngineUse"
    state: str = "failed"  # for the status file


def _run_job(
    args: argparse.Namespace,
    assembly: "Assembly",
    options: "JobOptions",
    run: _Run,
    num_lines: int,
) -> int | None:
    """Runs the job; the exit code when something stopped it before its end."""
    from jaxserve.offline.job import Job, JobFailed
    from jaxserve.offline.jsonl import read_lines
    from jaxserve.offline.parse import Encoder, Parser
    from jaxserve.offline.progress import Several, make_progress
    from jaxserve.offline.reader import Reader
    from jaxserve.offline.writer import InputError, Writer

    encode = Encoder(assembly.tokenizer, assembly.config, any_model=args.any_model)
    parse = Parser(common.read_sampling(args), encode)
    job = Job(assembly, options, run.totals)
    try:
        with Writer(args.output, overwrite=args.overwrite) as writer:
            progress = Several([make_progress(num_lines, sys.stderr), run.status])
            source = Reader(shard.select(read_lines(args.input), args.shard), parse)
            try:
                job.run(source, writer, progress)
            finally:
                source.stop()
                progress.close()
    except InputError as error:
        raise common.UsageError(str(error)) from error
    except (OSError, JobFailed) as error:  # a full disk, a share or a device that is gone
        common.note(f"error: {common.one_line(error)}")
        return common.SOME_FAILED
    except KeyboardInterrupt:
        run.state = "parked"
        return common.INTERRUPTED
    finally:
        run.use = job.use
        run.status.take(job.snapshot())
    return None


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        common.write_json(report)
        return
    common.note(
        f"{report['done']} done, {report['failed']} failed of {report['lines']} lines in "
        f"{report['wall_s']:.1f} s (start {report['startup_s']:.1f} s); "
        f"{report['output_tokens']} tokens, {report['output_tokens_per_s']:.0f} tok/s; "
        f"idle {report['idle_share']:.1%}, padding {report['time_waste']:.1%}; "
        f"results in {report['output']}"
    )
    if report.get("cost") is not None:
        common.note(f"cost {report['cost']:.4f} at {report['price_per_hour']:g} an hour")
    if report["interrupted"]:
        left = report["lines"] - report["done"] - report["failed"]
        common.note(f"stopped early: {left} lines have no result")
