"""`jaxserve batch`: every line of a JSONL file, and a file of results."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.build import Assembly
    from jaxserve.offline.job import JobOptions, Totals


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
    common.add_sampling_options(parser)
    common.add_engine_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from jaxserve.offline import reader
    from jaxserve.offline.writer import InputError, check_paths

    config = common.read_config(args)
    common.read_sampling(args)
    try:
        check_paths(args.input, args.output, overwrite=args.overwrite)
        total = reader.scan(args.input)
    except InputError as error:
        raise common.UsageError(str(error)) from error

    from jaxserve.offline.job import JobOptions, Totals

    start = time.monotonic()
    assembly = common.assemble(config, args)
    begun = time.monotonic()
    totals = Totals()
    options = JobOptions(token_ids=args.token_ids)
    try:
        stopped = _run_job(args, assembly, options, totals, total)
    finally:
        assembly.close()
    report = {
        "lines": total,
        **totals.report(time.monotonic() - begun),
        "startup_s": begun - start,
        "interrupted": stopped is not None,
        "model": assembly.config.model.name,
        "output": str(args.output),
    }
    _show(report, as_json=args.json)
    if stopped is not None:
        return stopped
    return common.SOME_FAILED if totals.failed else common.DONE


def _run_job(
    args: argparse.Namespace,
    assembly: "Assembly",
    options: "JobOptions",
    totals: "Totals",
    num_lines: int,
) -> int | None:
    """Runs the job; the exit code when something stopped it before its end."""
    from jaxserve.offline.job import Job, JobFailed
    from jaxserve.offline.jsonl import read_lines
    from jaxserve.offline.parse import Encoder, Parser
    from jaxserve.offline.progress import make_progress
    from jaxserve.offline.reader import Reader
    from jaxserve.offline.writer import InputError, Writer

    encode = Encoder(assembly.tokenizer, assembly.config, any_model=args.any_model)
    parse = Parser(common.read_sampling(args), encode)
    try:
        with Writer(args.output, overwrite=args.overwrite) as writer:
            progress = make_progress(num_lines, sys.stderr)
            source = Reader(read_lines(args.input), parse)
            try:
                Job(assembly, options, totals).run(source, writer, progress)
            finally:
                source.stop()
                progress.close()
    except InputError as error:
        raise common.UsageError(str(error)) from error
    except (OSError, JobFailed) as error:  # a full disk, a share or a device that is gone
        common.note(f"error: {common.one_line(error)}")
        return common.SOME_FAILED
    except KeyboardInterrupt:
        return common.INTERRUPTED
    return None


def _show(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        common.write_json(report)
        return
    common.note(
        f"{report['done']} done, {report['failed']} failed of {report['lines']} lines in "
        f"{report['wall_s']:.1f} s (start {report['startup_s']:.1f} s); "
        f"{report['output_tokens']} tokens, {report['output_tokens_per_s']:.0f} tok/s; "
        f"results in {report['output']}"
    )
    if report["interrupted"]:
        left = report["lines"] - report["done"] - report["failed"]
        common.note(f"stopped early: {left} lines have no result")
