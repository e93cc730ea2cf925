"""`jaxserve preflight`: compiles a config for a TPU or GPU that is not here."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.preflight.check import Result
    from jaxserve.preflight.child import Job


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "preflight",
        help="check a config for a TPU or GPU without having one",
        description=(
            "Compiles every program of a config for a target that need not be here, without "
            "weights, and says whether it fits: memory, KV in place, copies, collectives, and an "
            "estimate of step times. Exit code 0: fits, 1: does not, 2: bad usage."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target",
        required=True,
        metavar="CHIP[:TOPOLOGY]",
        help="v4, v5e, v5p, v6e, tpu7x with a topology (v5e:2x4); h100, h200, a100, l4 with a "
        "number (h200:4); cpu",
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument(
        "--max-kv", action="store_true", help="search the largest KV pool by compiling"
    )
    parser.add_argument(
        "--largest", action="store_true", help="only the largest program of each kind: quick"
    )
    parser.add_argument(
        "--context", type=int, default=1024, metavar="N", help="tokens a row of estimated steps"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="save the compiled programs (TPU and CPU)"
    )
    common.add_engine_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from jaxserve import settings
    from jaxserve.preflight import check, describe, report, target
    from jaxserve.preflight.child import Job

    common.check_at_least_one(args, "context")
    config = common.read_config(args)
    with _clear_errors():
        wanted = target.parse(args.target)
        missing = target.missing_compiler(wanted)
        if missing:
            raise common.UsageError(missing)
        if args.bundle is not None and wanted.platform == "cuda":
            raise common.UsageError(
                "--bundle: programs for a GPU that are compiled without it are not tuned; "
                "start on the GPU and keep its compile cache (runner.compile_cache)"
            )
        if args.bundle is not None and not config.cache.num_blocks:
            raise common.UsageError(
                "--bundle needs cache.num_blocks: its programs are for one size of the KV pool; "
                "without --bundle, preflight says how many blocks fit"
            )
        hf = describe.hf_config(config.model.name, args.config)
        job = Job(
            str(wanted),
            settings.dump(config),
            hf,
            only=[] if args.largest else None,
            bundle=str(args.bundle.absolute()) if args.bundle else "",
        )
        result = _compile(job, args)
        found = None
        if args.max_kv:
            found = check.search_largest(job, result, _notice(args))
    full = report.report(result, min(args.context, result.plan["max_len"]), found)
    if args.json:
        common.write_json(full)
    else:
        report.write_tables(full, common.write_out)
    return common.DONE if full["fits"] else common.SOME_FAILED


def _compile(job: "Job", args: argparse.Namespace) -> "Result":
    import dataclasses

    from jaxserve.preflight import check

    if args.largest:
        plan = check.compile_all(job).plan
        job = dataclasses.replace(job, only=check.largest_programs(plan["programs"]))
    return check.compile_all(job, _notice(args))


def _notice(args: argparse.Namespace) -> Any:
    return common.note if args.verbose else lambda line: None


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise common.UsageError(common.one_line(error)) from error
