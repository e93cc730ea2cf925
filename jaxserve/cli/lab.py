"""`jaxserve lab`: measures, simulates and compares; one module a command."""

from typing import Any

from jaxserve.cli import (
    lab_compare,
    lab_doctor,
    lab_profile,
    lab_simulate,
    lab_suggest,
    lab_tune,
)

_COMMANDS = (lab_compare, lab_doctor, lab_profile, lab_simulate, lab_suggest, lab_tune)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "lab",
        help="measure what steps cost, simulate, choose buckets and budgets",
        description="Measures on the device that is here; the same commands on CPU, TPU and GPU.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.register(commands)
