"""`jaxserve lab tune`: a configuration for latency limits, simulated first and then measured."""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.lab.bench_process import Processes
    from jaxserve.lab.subject import Costs
    from jaxserve.lab.tune import Limits, Tuned


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="choose token budget, seats and partial prefills for latency limits",
        description=(
            "Measures what steps cost, simulates the workload over budgets, seats and partial "
            "prefills, measures the best few in fresh processes on this device, chooses by "
            "goodput, checks the choice under overload, and writes it as TOML. What runs now "
            "stays unless something is better by more than noise."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--workload", type=Path, required=True, metavar="FILE")
    parser.add_argument("--ttft-slo", type=float, metavar="MS", help="to the first token")
    parser.add_argument("--tpot-slo", type=float, metavar="MS", help="a token after the first")
    parser.add_argument(
        "--costs", metavar="FILE|NAME", help="costs to simulate with; default: measured first"
    )
    parser.add_argument(
        "--measure", type=int, default=3, metavar="N", help="how many are measured; default 3"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds; default 3")
    parser.add_argument("--timeout", type=float, metavar="S", help="most seconds of one run")
    parser.add_argument("--write", type=Path, metavar="FILE.toml", help="write the choice there")
    parser.add_argument("--json", action="store_true", help="print one object")
    common.add_engine_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    config = _check(args)
    from jaxserve.lab import tune_text
    from jaxserve.lab.bench_process import Processes
    from jaxserve.lab.tune import Limits

    limits = Limits(args.ttft_slo, args.tpot_slo)
    with tempfile.TemporaryDirectory(prefix="jaxserve-tune-") as name:
        processes = Processes(Path(name), _options(args), cold=False, timeout_s=args.timeout)
        try:
            found = _tune(args, config, limits, processes)
        except ValueError as error:
            raise common.UsageError(common.one_line(error)) from error
    toml = tune_text.toml(config, found)
    if args.write is not None:
        args.write.write_text(toml, encoding="utf-8")
    if args.json:
        common.write_json(dataclasses.asdict(found))
    else:
        common.write_out(tune_text.text(found))
    return common.SOME_FAILED if found.measured.failed else common.DONE


def _check(args: argparse.Namespace) -> "EngineConfig":
    """Raises UsageError for anything that would fail later."""
    common.check_above_zero(args, "ttft_slo", "tpot_slo", "timeout")
    common.check_at_least_one(args, "measure", "repeats")
    if args.ttft_slo is None and args.tpot_slo is None:
        raise common.UsageError("name a limit: --ttft-slo, --tpot-slo or both")
    common.check_folders(args, "write")
    return common.read_config(args)


def _options(args: argparse.Namespace) -> list[str]:
    """What every measured run is given."""
    words = ["--workload", str(args.workload)]
    given = {
        "config": args.config,
        "model": args.model,
        "slo-ttft-ms": args.ttft_slo,
        "slo-tpot-ms": args.tpot_slo,
    }
    for option, value in given.items():
        if value is not None:
            words += [f"--{option}", str(value)]
    for text in args.set:
        words += ["--set", text]
    return words


def _tune(
    args: argparse.Namespace, config: "EngineConfig", limits: "Limits", processes: "Processes"
) -> "Tuned":
    from jaxserve.lab import arrivals, compare, tune
    from jaxserve.offline.workload import read_workload

    offered = arrivals.of_workload(read_workload(args.workload))
    base = tune.current(config)
    costs = _costs(args, processes, base)
    facts = costs.facts
    if facts is None:
        from jaxserve.lab import subject

        facts = subject.facts_of_model(config, args.config)
    load = tune.Load(offered, costs.model, dataclasses.replace(facts, single=costs.single))
    config = dataclasses.replace(
        config, cache=dataclasses.replace(config.cache, prefix_caching=False)
    )
    plan = tune.plan(config, load, limits)
    common.note(f"simulated {len(plan.simulated)} configurations; measuring the best")
    tried = tune.best_few(plan.simulated, base, args.measure)
    main = "goodput requests/s"
    variants = [candidate.variant for candidate in tried]
    runs, failed = compare.measure(variants, args.repeats, processes.run, common.note)
    measured = compare.compare(args.workload.name, runs, failed, main)
    choice = tune.choose(measured, tried)
    checked = tune.overload(config, load, choice.candidate, limits)
    return tune.Tuned(limits, plan, tried, measured, choice, checked)


def _costs(args: argparse.Namespace, processes: "Processes", base: Any) -> "Costs":
    """Of --costs, or of one recorded run of what runs now."""
    from jaxserve.lab import subject
    from jaxserve.lab.compare import RunFailed

    if args.costs is not None:
        return subject.read_costs(subject.find(args.costs))
    common.note("measuring what steps cost")
    try:
        return subject.of_trace(processes.run(base.variant, 0).trace)
    except RunFailed as error:
        raise common.UsageError(f"the configuration as it is failed: {error}") from error
