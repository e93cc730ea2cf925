"""`jaxserve lab suggest`: which buckets would have served a recorded run best."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.lab.suggest import BucketSet, Suggestion


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "suggest",
        help="the best buckets for a recorded run",
        description=(
            "Reads a trace that --record wrote, and finds the token and row buckets in which its "
            "steps would have taken the least device time under the scheduler's own snapping, with "
            "the costs that the trace carries. Says what each program more would buy, and when the "
            "default is as good."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--max-programs", type=int, metavar="K", help="compiled programs; default: as many as now"
    )
    parser.add_argument(
        "--max-compile-seconds",
        type=float,
        metavar="S",
        help="of all programs one after the other, by what they took in the recorded start",
    )
    parser.add_argument(
        "--max-memory",
        type=float,
        metavar="MIB",
        help="of the programs: code of all, and the largest scratch",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="the recorded settings with these buckets, TOML"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    common.check_above_zero(args, "max_programs", "max_compile_seconds", "max_memory")
    common.check_folders(args, "write")
    from jaxserve.lab import suggest, trace

    limits = suggest.Limits(
        programs=args.max_programs,
        compile_s=args.max_compile_seconds,
        memory_mib=args.max_memory,
    )
    try:
        loaded = trace.load(args.trace)
        found = suggest.suggest(loaded, limits)
    except ValueError as error:
        raise common.UsageError(common.one_line(error)) from error
    if args.json:
        common.write_json({**dataclasses.asdict(found), **_verdict(found)})
    else:
        common.write_out(_text(found))
    if found.best is None:
        return common.SOME_FAILED
    if args.write is not None:
        _write(args.write, loaded.header.config, found.best)
    return common.DONE


def _verdict(found: "Suggestion") -> dict[str, Any]:
    return {
        "gain": found.gain,
        "default_is_as_good": found.default_is_as_good,
        "verdict": _sentence(found),
    }


def _sentence(found: "Suggestion") -> str:
    best, default = found.best, found.default
    if best is None:
        return "no bucket set keeps within the limits; raise one of them"
    optimal = ""
    if best.slack > 1e-4:
        optimal = f" (any other set of that many saves at most {best.slack:.1%} more)"
    if not found.default_is_as_good:
        return (
            f"the set above takes {found.gain:.1%} less device time than the default with "
            f"{best.programs} programs against {default.programs}{optimal}"
        )
    if best.programs < default.programs and best.seconds <= 1.01 * default.seconds:
        return (
            f"the default is as good in time ({found.gain:+.1%}); this set has "
            f"{default.programs - best.programs} programs less{optimal}"
        )
    if found.gain < 0:
        return (
            f"the default is better by {-found.gain:.1%}, with {default.programs} programs; the "
            f"limits allow none as good{optimal}"
        )
    return f"keep the default: the best set would save {found.gain:.1%}, which is noise{optimal}"


def _text(found: "Suggestion") -> str:
    import io

    from rich.console import Console
    from rich.table import Table

    buffer = io.StringIO()
    console = Console(file=buffer, width=110, highlight=False)
    table = Table(title=f"{found.steps} recorded steps")
    for name in (
        "",
        "programs",
        "compile s",
        "MiB",
        "device s",
        "padding",
        "token buckets",
        "rows",
    ):
        text = name in ("", "token buckets", "rows")
        table.add_column(name, justify="left" if text else "right")
    for name, entry in (("default", found.default), ("recorded", found.recorded)):
        table.add_row(name, *_cells(entry))
    if found.best is not None:
        table.add_row("best", *_cells(found.best), style="bold")
    console.print(table)
    ladder = Table(title="What each program more buys")
    for name in ("programs", "device s", "padding", "saves", "token buckets", "rows"):
        text = name in ("token buckets", "rows")
        ladder.add_column(name, justify="left" if text else "right")
    before = None
    for rung in found.ladder:
        saved = "" if before is None else f"{1 - rung.seconds / before.seconds:.1%}"
        cells = _cells(rung)
        ladder.add_row(cells[0], cells[3], cells[4], saved, cells[5], cells[6])
        before = rung
    console.print(ladder)
    if not found.measured:
        console.print("The trace has no measured costs: seconds are padded tokens, an estimate.")
    console.print(_sentence(found)[:1].upper() + _sentence(found)[1:] + ".")
    if found.best is not None:
        console.print(f"\n[buckets]\n{_toml(found.best)}", markup=False)
    return buffer.getvalue()


def _cells(entry: "BucketSet") -> list[str]:
    return [
        str(entry.programs),
        f"{entry.compile_s:.1f}",
        f"{entry.memory_mib:.1f}",
        f"{entry.seconds:.4g}",
        f"{entry.time_waste:.1%}",
        " ".join(map(str, entry.tokens)),
        " ".join(map(str, entry.rows)),
    ]


def _toml(entry: "BucketSet") -> str:
    return f"tokens = {list(entry.tokens)}\nrows = {list(entry.rows)}"


def _write(path: Path, config: str, best: "BucketSet") -> None:
    from jaxserve import settings
    from jaxserve.config import BucketConfig

    recorded = settings.loads(config)
    changed = dataclasses.replace(recorded, buckets=BucketConfig(best.tokens, best.rows))
    path.write_text(settings.dump(changed), encoding="utf-8")
