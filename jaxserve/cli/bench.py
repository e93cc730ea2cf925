"""`jaxserve bench`: replays a workload in this process and prints what it took."""

import argparse
import dataclasses
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common, recording

if TYPE_CHECKING:
    from jaxserve.build import Assembly
    from jaxserve.metrics import StepRecord
    from jaxserve.offline.workload import WorkItem

_KIB_PER_MB = 1024 if sys.platform != "darwin" else 1 << 20  # unit of ru_maxrss


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="throughput and latency of a workload",
        description=(
            "Replays a workload (JSONL of id, prompt_token_ids, max_tokens and arrive) greedily, "
            "EOS ignored, and prints throughput, latency and where the time went. The prefix "
            "cache is off unless asked for."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--workload", type=Path, required=True, metavar="FILE")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="measured runs")
    parser.add_argument(
        "--slo-ttft-ms", type=float, metavar="MS", help="limit for goodput; default: [slo]"
    )
    parser.add_argument(
        "--slo-tpot-ms", type=float, metavar="MS", help="limit for goodput; default: [slo]"
    )
    parser.add_argument("--prefix-caching", action="store_true", help="keep the prefix cache on")
    parser.add_argument(
        "--save-outputs", type=Path, metavar="FILE", help="token ids of the last run, as JSON"
    )
    parser.add_argument("--json", action="store_true", help="print one object a run")
    recording.add_options(parser)
    common.add_engine_options(parser)
    common.add_deadline_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    recording.check(args)
    config = common.read_config(args)
    items = _read(args)
    caching = dataclasses.replace(config.cache, prefix_caching=args.prefix_caching)
    config = dataclasses.replace(config, cache=caching)

    records: list[StepRecord] = []
    assembly = common.assemble(config, args, on_step=records.append)
    startup = time.perf_counter() - common.STARTED
    try:
        outputs = _measure(args, assembly, items, records, startup)
    finally:
        assembly.close()
    if args.save_outputs is not None:
        _save(args.save_outputs, outputs)
    return common.DONE


def _read(args: argparse.Namespace) -> "list[WorkItem]":
    from jaxserve.offline.errors import InputError
    from jaxserve.offline.workload import read_workload

    common.check_at_least_one(args, "repeat")
    common.check_above_zero(args, "slo_ttft_ms", "slo_tpot_ms")
    common.check_folders(args, "save_outputs")
    try:
        return read_workload(args.workload)
    except InputError as error:
        raise common.UsageError(str(error)) from error


def _measure(
    args: argparse.Namespace,
    assembly: "Assembly",
    items: "list[WorkItem]",
    records: "list[StepRecord]",
    startup: float,
) -> list[tuple[int, ...]]:
    """Prints one report a run; returns the output ids of the last."""
    from jaxserve.driver import Driver
    from jaxserve.offline.figures import Sizes, goodput, latency_figures, step_figures
    from jaxserve.offline.workload import replay, warm_up_items

    driver = Driver(assembly.engine, assembly.tokenizer)
    outputs: list[tuple[int, ...]] = []
    try:
        replay(driver, warm_up_items(items))
        for number in range(args.repeat):
            records.clear()
            with recording.last_of(args, assembly, number == args.repeat - 1):
                result = replay(driver, items)
            report = {
                **_heading(assembly, args.workload, startup),
                **latency_figures(Sizes.of(items), result),
                "goodput": goodput(
                    result,
                    args.slo_ttft_ms or assembly.config.slo.ttft_ms or None,
                    args.slo_tpot_ms or assembly.config.slo.tpot_ms or None,
                ),
                **step_figures(records, result),
                **_device(assembly),
            }
            common.write_out(_text(report)) if not args.json else common.write_json(report)
            outputs = result.outputs
    except ValueError as error:  # a prompt that can never run
        raise common.UsageError(f"{args.workload}: {common.one_line(error)}") from error
    return outputs


def _heading(assembly: "Assembly", workload: Path, startup: float) -> dict[str, Any]:
    config = assembly.config
    return {
        "engine": f"jaxserve {common.version()}",
        "model": config.model.name,
        "dtype": config.model.dtype,
        "kv_dtype": config.cache.dtype,
        "budget": config.scheduler.token_budget,
        "workload": workload.name,
        "startup_s": startup,
    }


def _device(assembly: "Assembly") -> dict[str, Any]:
    runner = assembly.runner
    return {
        "compiles_after_warmup": runner.compiles_after_warmup,
        "programs": len(runner.manifest),
        "compile_s": runner.manifest.compile_s,
        "startup": assembly.startup,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _KIB_PER_MB,
        "peak_device_mb": _peak_device_mb(),
    }


def _peak_device_mb() -> float | None:
    """Most bytes in use on one device; None where it does not tell, as a CPU."""
    jax = sys.modules.get("jax")
    stats = jax.local_devices()[0].memory_stats() if jax else None
    return stats["peak_bytes_in_use"] / 1e6 if stats and "peak_bytes_in_use" in stats else None


def _save(path: Path, outputs: list[tuple[int, ...]]) -> None:
    import msgspec

    path.write_bytes(msgspec.json.encode(outputs))


def _text(report: dict[str, Any]) -> str:
    """The report for people: one figure a line, nested ones joined with a dot."""
    lines: list[str] = []
    for name, value in report.items():
        entries = (
            {f"{name}.{key}": one for key, one in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        lines += [f"{key:32}{_number(one)}" for key, one in entries.items()]
    return "\n".join(lines) + "\n\n"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    return "-" if value is None else str(value)
