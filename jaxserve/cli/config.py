"""`jaxserve config`: the settings that would run."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="print the settings that would run, as TOML",
        description=(
            "Prints every setting, from defaults, --config and --set, as TOML, with everything "
            "derived that does not depend on the model; what does stays 0 or auto."
        ),
        allow_abbrev=False,
    )
    common.add_engine_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    config = common.read_config(args)
    from jaxserve import settings

    try:
        resolved = _resolve_without_model(config)
    except ValueError as error:
        raise common.UsageError(common.one_line(error)) from error
    common.write_out(settings.dump(resolved))
    return common.DONE


def _resolve_without_model(config: "EngineConfig") -> "EngineConfig":
    """Buckets and scheduler are resolved; the length and the pool are the model's business.

    Raises ValueError for settings that contradict each other.
    """
    from jaxserve.batch.buckets import resolve

    longest, smallest_block = config.model.max_len or 1 << 30, 1  # no model contradicts these
    resolved = resolve(config, longest, smallest_block)
    scheduler = resolved.scheduler
    if not config.model.max_len:  # the threshold is a share of the length
        threshold = config.scheduler.long_prefill_threshold
        scheduler = dataclasses.replace(scheduler, long_prefill_threshold=threshold)
    return dataclasses.replace(config, buckets=resolved.buckets, scheduler=scheduler)
