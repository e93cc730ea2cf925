"""The command `jaxserve`: finds the command asked for and turns errors into messages and exit
codes."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxserve.cli import (
    batch,
    batch_merge,
    batch_status,
    bench,
    common,
    config,
    generate,
    lab,
    model,
    preflight,
    serve,
)

_COMMANDS = (
    *(generate, serve, batch, batch_status, batch_merge, bench, lab),
    *(preflight, model, config),
)
_TWO_WORDS = ("status", "merge")  # after `batch`; an input of that name is written ./status


class _Parser(argparse.ArgumentParser):
    """Bad usage is one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        hint = f"; see {self.prog} --help"
        self.exit(common.BAD_USAGE, f"jaxserve: error: {message}{hint}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 some items failed, 2 bad usage or input,
    75 stopped early and resumable, 130 ended by Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["batch"] and words[1:2] and words[1] in _TWO_WORDS:
        words[:2] = [" ".join(words[:2])]
    args = _parser().parse_args(words)
    try:
        return args.func(args)
    except common.UsageError as error:
        common.note(f"error: {error}")
        return common.BAD_USAGE
    except KeyboardInterrupt:
        return common.INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has left; nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return common.SOME_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxserve",
        description="LLM inference on JAX: every step is one of a small set of compiled shapes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {common.version()}")
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for command in _COMMANDS:
        command.register(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
