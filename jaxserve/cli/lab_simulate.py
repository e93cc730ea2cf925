"""`jaxserve lab simulate`: a load in virtual time on measured, tabled or estimated costs."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.lab.arrivals import Arrival
    from jaxserve.lab.subject import Subject
    from jaxserve.lab.trace import Trace

SCHEDULERS = ("production", "prefill-first", "unmixed")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="what a load would meet: the real scheduler in virtual time",
        description=(
            "Runs the engine of this configuration on a clock of its own, each step taking what a "
            "cost model says, and prints the figures of jaxserve bench. Costs: those of a "
            "recorded run, a table (jaxserve lab profile), or a chip's data sheet. Load: a "
            "recorded run, a workload, or requests drawn from a seed."
        ),
        allow_abbrev=False,
    )
    add_load_options(parser)
    add_cost_options(parser)
    add_slo_options(parser)
    parser.add_argument(
        "--scheduler",
        choices=SCHEDULERS,
        default="production",
        help="rules to compare with, which exist in simulations only: prefill-first (whole prompts "
        "before any decode), unmixed (chunks and decodes in turn)",
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    common.add_engine_options(parser)
    parser.set_defaults(func=run)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Which requests come, and when."""
    group = parser.add_argument_group("load, one of")
    group.add_argument("--trace", type=Path, metavar="FILE", help="the requests of a recorded run")
    group.add_argument("--workload", type=Path, metavar="FILE", help="as jaxserve bench replays it")
    group.add_argument("--rate", type=float, metavar="R", help="R requests a second on average")
    group = parser.add_argument_group("with --rate")
    group.add_argument("--requests", type=int, default=1000, metavar="N", help="default 1000")
    group.add_argument(
        "--burst", type=int, default=1, metavar="N", help="N at a time; default 1: Poisson"
    )
    lengths = "N, LOW..HIGH (evenly between) or MEDIAN/P90 (log-normal); default %(default)s"
    group.add_argument("--prompt-tokens", default="1024", metavar="LENGTHS", help=lengths)
    group.add_argument("--output-tokens", default="128", metavar="LENGTHS", help=lengths)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of times and lengths")


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """What a step takes."""
    group = parser.add_argument_group("costs, one of; those of --trace where none is given")
    group.add_argument(
        "--costs",
        metavar="FILE|NAME",
        help="of a recorded run, a table, or one of those that come with jaxserve by its name: "
        "a100-llama3-8b, a100x2-codellama-34b",
    )
    group.add_argument(
        "--chip", metavar="TARGET", help="by the data sheet: h200, a100:2, v5e:2x4, ..."
    )
    group.add_argument(
        "--efficiency",
        type=float,
        default=1.0,
        metavar="X",
        help="with --chip: share of the data sheet to count on; default 1, which none reaches",
    )
    group.add_argument(
        "--host-ms", type=float, metavar="MS", help="host time a step, in place of the recorded"
    )


def add_slo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ttft-slo", type=float, metavar="MS", help="limit for goodput")
    parser.add_argument("--tpot-slo", type=float, metavar="MS", help="limit for goodput")


def run(args: argparse.Namespace) -> int:
    check(args)
    try:
        from jaxserve.lab import baselines, simulate, simulate_text, trace

        recorded = None if args.trace is None else trace.load(args.trace)
        subject = read_subject(args, recorded)
        offered = read_load(args, recorded, subject.config.model.max_len)
        sampler = "greedy" if recorded is None else simulate.sampler_of(recorded)
        make_engine = baselines.ENGINES[args.scheduler]
        played = simulate.play(
            subject.config,
            subject.model,
            offered,
            sampler=sampler,
            windows=subject.windows,
            make_engine=make_engine,
        )
    except ValueError as error:
        raise common.UsageError(common.one_line(error)) from error
    report = {
        "simulated": True,
        "costs": subject.source,
        "model": subject.config.model.name,
        "scheduler": args.scheduler,
        "budget": subject.config.scheduler.token_budget,
        **simulate.report(played, args.ttft_slo, args.tpot_slo),
    }
    if args.json:
        common.write_json(report)
    else:
        common.write_out(simulate_text.text(report))
    return common.DONE


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for options that are wrong by themselves."""
    common.check_above_zero(args, "rate", "efficiency", "host_ms", "ttft_slo", "tpot_slo")
    common.check_at_least_one(args, "requests", "burst")
    if args.seed < 0:
        raise common.UsageError(f"--seed {args.seed} must be at least 0")
    loads = [name for name in ("trace", "workload", "rate") if getattr(args, name) is not None]
    if len(loads) != 1:
        raise common.UsageError("name one load: --trace, --workload or --rate")
    if args.costs is not None and args.chip is not None:
        raise common.UsageError("--costs and --chip exclude each other")
    if args.costs is None and args.chip is None and args.trace is None:
        raise common.UsageError("name the costs: --costs FILE or --chip TARGET")


def read_subject(args: argparse.Namespace, recorded: "Trace | None") -> "Subject":
    """Raises ValueError and UsageError for costs or settings that cannot be read."""
    from jaxserve import settings
    from jaxserve.config import BucketConfig
    from jaxserve.lab import subject

    host_s = None if args.host_ms is None else args.host_ms / 1e3
    given = args.config is not None or args.model is not None
    if args.chip is not None:
        config = common.read_config(args)
        if recorded is not None and not given:
            config = settings.assign(settings.loads(recorded.header.config), args.set)
        return subject.on_chip(
            config, args.config, args.chip, efficiency=args.efficiency, host_s=host_s or 0.0
        )
    path = args.trace if args.costs is None else subject.find(args.costs)
    costs = subject.read_costs(path)
    config = common.read_config(args)
    base = costs.config if recorded is None else settings.loads(recorded.header.config)
    if not given and base is not None:
        config = settings.assign(base, args.set)
    if config.buckets == BucketConfig():  # this process cannot tell which a device would have
        config = dataclasses.replace(config, buckets=costs.buckets)
    facts = costs.facts or subject.facts_of_model(config, args.config)
    model = costs.model
    if host_s is not None:
        model = dataclasses.replace(model, host=host_s, host_row=0.0)
    source = f"{path.name}, {costs.source}"
    return subject.Subject(subject.resolved(config, facts), model, source, facts.windows)


def read_load(args: argparse.Namespace, recorded: "Trace | None", max_len: int) -> "list[Arrival]":
    """Raises ValueError for a load that cannot be read or drawn."""
    from jaxserve.lab import arrivals
    from jaxserve.offline.workload import read_workload

    if recorded is not None:
        return arrivals.of_trace(recorded)
    if args.workload is not None:
        return arrivals.of_workload(read_workload(args.workload))
    prompt = arrivals.lengths(args.prompt_tokens, max_len - 1)
    output = arrivals.lengths(args.output_tokens, max_len - 1)
    return arrivals.generated(
        args.requests, args.rate, prompt, output, burst=args.burst, seed=args.seed
    )
