"""`jaxserve lab compare`: configurations against each other on the device that is here."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.lab.compare import Comparison, Variant


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="measure configurations against each other, and tell noise from difference",
        description=(
            "Runs a workload in every configuration, each run in a fresh process on this device, "
            "interleaved in rounds, and reports differences to the first configuration with "
            "confidence intervals. Exit code 1 when a configuration failed."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG.toml")
    parser.add_argument("--workload", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="SECTION.KEY=V,V,...",
        help="every configuration with each of these values; may be repeated",
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds; default 5")
    parser.add_argument("--ttft-slo", type=float, metavar="MS", help="limit for goodput")
    parser.add_argument("--tpot-slo", type=float, metavar="MS", help="limit for goodput")
    parser.add_argument("--prefix-caching", action="store_true", help="keep the prefix cache on")
    parser.add_argument(
        "--no-cold",
        action="store_true",
        help="use the compile cache of the settings; without, each configuration begins with an "
        "empty one, and its first run tells the compile seconds",
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="most seconds of one run")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the traces of all runs there"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with plots")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.svg", help="the changes alone, for a document"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    _add_engine_options(parser)
    parser.set_defaults(func=run)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine, for every configuration")
    group.add_argument("--model", metavar="NAME|PATH")
    group.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")


def run(args: argparse.Namespace) -> int:
    from jaxserve.lab import compare
    from jaxserve.lab.bench_process import Processes

    wanted = _variants(args)
    main = "output tokens/s"
    if args.ttft_slo is not None or args.tpot_slo is not None:
        main = "goodput requests/s"
    with _folder(args.keep) as folder:
        processes = Processes(folder, _options(args), cold=not args.no_cold, timeout_s=args.timeout)
        runs, failed = compare.measure(wanted, args.repeats, processes.run, common.note)
    found = compare.compare(args.workload.name, runs, failed, main)
    _show(args, found)
    return common.SOME_FAILED if failed else common.DONE


def _variants(args: argparse.Namespace) -> "list[Variant]":
    """Raises UsageError for anything that would fail later in every run."""
    from jaxserve import settings
    from jaxserve.lab.compare import variants
    from jaxserve.offline.errors import InputError
    from jaxserve.offline.workload import read_workload

    common.check_at_least_one(args, "repeats")
    common.check_above_zero(args, "ttft_slo", "tpot_slo", "timeout")
    common.check_folders(args, "html", "picture")
    try:
        read_workload(args.workload)
        found = variants(args.configs, args.sweep)
        for path in args.configs:
            settings.read(path, args.set)
        for variant in found:
            options = variant.options
            path = Path(options[1]) if options[:1] == ("--config",) else None
            sets = [b for a, b in zip(options, options[1:], strict=False) if a == "--set"]
            settings.read(path, [*args.set, *sets])
    except (InputError, ValueError) as error:
        raise common.UsageError(common.one_line(error)) from error
    if len(found) < 2:
        raise common.UsageError("name two configurations or more, or a --sweep of one")
    if len({variant.name for variant in found}) < len(found):
        raise common.UsageError("a configuration is named twice")
    return found


def _options(args: argparse.Namespace) -> list[str]:
    words = ["--workload", str(args.workload)]
    given = {"model": args.model, "slo-ttft-ms": args.ttft_slo, "slo-tpot-ms": args.tpot_slo}
    for option, value in given.items():
        if value is not None:
            words += [f"--{option}", str(value)]
    for text in args.set:
        words += ["--set", text]
    return [*words, "--prefix-caching"] if args.prefix_caching else words


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="jaxserve-compare-") as name:
        yield Path(name)


def _show(args: argparse.Namespace, found: "Comparison") -> None:
    from jaxserve.lab import compare_html, compare_text

    if args.html is not None:
        args.html.write_text(compare_html.page(found), encoding="utf-8")
    if args.picture is not None:
        args.picture.write_text(compare_html.picture(found), encoding="utf-8")
    if args.json:
        common.write_json(compare_text.as_object(found))
    else:
        common.write_out(compare_text.text(found))
