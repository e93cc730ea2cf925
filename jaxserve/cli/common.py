"""What the commands share: options, messages, and the way from options to an engine.

Nothing here imports jax before `assemble` is called: `--help` and bad usage answer at once.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli.cold_start import ColdStart
from jaxserve.offline import stop

if TYPE_CHECKING:
    from jaxserve.build import Assembly
    from jaxserve.config import EngineConfig
    from jaxserve.metrics import StepRecord
    from jaxserve.request import SamplingParams

STARTED = time.perf_counter()  # of the process, as near as this module can tell
DONE = 0
SOME_FAILED = 1
BAD_USAGE = 2
PARKED = stop.PARKED  # stopped early: the same command goes on where it was
INTERRUPTED = 130  # ended by Ctrl-C, as shells count it


class UsageError(Exception):
    """Bad usage or input: one line for the user, exit code 2."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """--model, --config, --set and --verbose."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="folder, .gguf file, Orbax folder, hub name or gemma3-270m; "
        "default: SmolLM2-135M-Instruct",
    )
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="one setting, over the config file; may be repeated",
    )
    group.add_argument("--verbose", action="store_true", help="say on stderr what is going on")


def add_deadline_options(parser: argparse.ArgumentParser) -> None:
    """--ttft-slo and --tpot-slo."""
    group = parser.add_argument_group("deadlines, which turn scheduler.mode to time")
    for name, what in (("ttft", "the first token"), ("tpot", "each token after the first")):
        group.add_argument(
            f"--{name}-slo",
            dest=f"{name}_due",
            action="append",
            default=[],
            metavar="[CLASS=]MS",
            help=f"when {what} is due, for requests whose slo_class is CLASS, or that name none",
        )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn; what is not given keeps the default of SamplingParams."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of the answer")
    group.add_argument("--temperature", type=float, metavar="X", help="0: always the best token")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text; may be repeated",
    )


def check_above_zero(args: argparse.Namespace, *names: str) -> None:
    """Raises UsageError for an option that was given as something else."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{_option(name)} {value} must be above 0")


def check_at_least_one(args: argparse.Namespace, *names: str) -> None:
    """Raises UsageError for an option that was given as less."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"{_option(name)} {value} must be at least 1")


def check_folders(args: argparse.Namespace, *names: str) -> None:
    """Raises UsageError for an option that names a file in a folder that is not there."""
    for name in names:
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"the folder of {_option(name)} does not exist: {path}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_config(args: argparse.Namespace) -> "EngineConfig":
    """Raises UsageError for settings that cannot be read."""
    from jaxserve import settings

    try:
        config = settings.read(args.config, args.set)
        if hasattr(args, "ttft_due"):
            config = _with_deadlines(config, args)
    except settings.SettingsError as error:
        raise UsageError(str(error)) from error
    if args.model is None:
        return config
    if not args.model:
        raise UsageError("--model needs a name or a path")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, name=args.model))


def _with_deadlines(config: "EngineConfig", args: argparse.Namespace) -> "EngineConfig":
    """--ttft-slo and --tpot-slo over the settings.  Raises SettingsError."""
    from jaxserve import settings
    from jaxserve.config import SloClass

    for name in ("ttft", "tpot"):
        for text in getattr(args, f"{name}_due"):
            where = f"--{name}-slo {text}"
            key, _, raw = text.rpartition("=")
            try:
                milliseconds = float(raw)
            except ValueError:
                raise settings.SettingsError(f"{where}: write it as [CLASS=]MS") from None
            values: dict[str, Any] = {f"{name}_ms": milliseconds}
            if key:
                old = config.slo.classes.get(key, SloClass())
                merged = {"ttft_ms": old.ttft_ms, "tpot_ms": old.tpot_ms} | values
                values = {"classes": {**config.slo.classes, key: merged}}
            config = settings.merge(config, {"slo": values}, where)
    chosen = any(text.partition("=")[0].strip() == "scheduler.mode" for text in args.set)
    if (args.ttft_due or args.tpot_due) and not chosen:
        config = settings.merge(config, {"scheduler": {"mode": "time"}}, "--tpot-slo")
    return config


def read_sampling(args: argparse.Namespace, **more: Any) -> "SamplingParams":
    """Raises UsageError for values no request may have."""
    from jaxserve.request import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.stop is not None:
        given["stop"] = tuple(args.stop)
    try:
        return SamplingParams(**given, **more)
    except ValueError as error:
        raise UsageError(str(error)) from error


def assemble(
    config: "EngineConfig",
    args: argparse.Namespace,
    on_step: "Callable[[StepRecord], None] | None" = None,
) -> "Assembly":
    """Loads the model and makes the engine ready.  Raises UsageError for a model or settings that
    do not work."""
    start_logging(args.verbose)
    from jaxserve.build import assemble as build

    uncached = config.runner.compile_cache == "off"
    cold = ColdStart(sys.stderr, "every start does" if uncached else "later starts are faster")
    try:
        return build(
            config,
            on_step=on_step,
            on_compile=cold.update,
            log=log if args.verbose else log_warning,
        )
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a proof, the device
        if args.verbose:
            raise
        raise UsageError(one_line(error)) from error
    finally:
        cold.close()


def start_logging(verbose: bool) -> None:
    """Everything that libraries log goes to stderr in one form."""
    from absl import logging

    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO if verbose else logging.WARNING)
    logging.set_stderrthreshold(logging.INFO if verbose else logging.WARNING)


def log(line: str) -> None:
    note(line)


def log_warning(line: str) -> None:
    if line.startswith("warning:"):
        note(line)


def note(line: str) -> None:
    """One line for people, on stderr."""
    sys.stderr.write(f"jaxserve: {line}\n")
    sys.stderr.flush()


def write_json(value: dict[str, Any]) -> None:
    """One object on one line of stdout; numbers that JSON cannot write become null."""
    import msgspec

    write_out(msgspec.json.encode(value).decode() + "\n")


def write_out(text: str) -> None:
    """A result, on stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def one_line(error: BaseException) -> str:
    """The message of an error without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def version() -> str:
    import jaxserve

    return jaxserve.__version__
