"""`jaxserve config`: the settings that would run."""

import argparse
from typing import Any

from jaxserve.cli import common


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="print the settings that would run, as TOML",
        description="Prints every setting, from defaults, --config and --set, as TOML.",
        allow_abbrev=False,
    )
    common.add_engine_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    config = common.read_config(args)
    from jaxserve import settings

    common.write_out(settings.dump(config))
    return common.DONE
