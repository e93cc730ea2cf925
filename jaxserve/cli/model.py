"""jaxserve model pull | inspect | convert."""

import argparse
from pathlib import Path
from typing import Any

from jaxserve.cli import common


def register(subparsers: Any) -> None:
    """Adds `model` and its three commands to the command line."""
    parser = subparsers.add_parser("model", help="fetch, look at, or convert a model")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    pull = commands.add_parser("pull", help="fetch a model into the cache; prints its path")
    pull.add_argument(
        "name",
        nargs="?",
        help="gemma3-270m, or a hub name (owner/name); without: the default model",
    )
    _add_cache_dir(pull)
    pull.set_defaults(func=run, action=_pull)

    inspect = commands.add_parser("inspect", help="sizes and types, without loading weights")
    inspect.add_argument(
        "model",
        nargs="?",
        help="path or name, also of a config.json alone; without: the default model",
    )
    inspect.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _add_cache_dir(inspect)
    inspect.set_defaults(func=run, action=_inspect)

    convert = commands.add_parser("convert", help="write a model as safetensors or Orbax")
    convert.add_argument("source", metavar="SRC", help="path or name of a model")
    convert.add_argument("destination", metavar="DST", help="folder to write (Orbax: or gs://...)")
    convert.add_argument("--format", choices=("safetensors", "orbax"), required=True)
    convert.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="cast; default: every tensor's own type"
    )
    convert.add_argument("--force", action="store_true", help="replace an existing model folder")
    _add_cache_dir(convert)
    convert.set_defaults(func=run, action=_convert)


def run(args: argparse.Namespace) -> int:
    """Raises UsageError for a model that is not there, is damaged or cannot be used."""
    try:
        args.action(args)
    except (ValueError, OSError) as error:
        raise common.UsageError(common.one_line(error)) from error
    return common.DONE


def _add_cache_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="where fetched models are kept"
    )


def _pull(args: argparse.Namespace) -> None:
    common.write_out(f"{_resolve(args.name, args.cache_dir)}\n")


def _inspect(args: argparse.Namespace) -> None:
    from jaxserve.inspect_model import describe, opened

    facts = describe(opened(_resolve(args.model, args.cache_dir)))
    if args.json:
        common.write_json(facts)
        return
    for name, value in facts.items():
        common.write_out(f"{name.replace('_', ' '):20} {_text(value)}\n")


def _convert(args: argparse.Namespace) -> None:
    from jaxserve.convert import convert

    source = _resolve(args.source, args.cache_dir)
    convert(source, args.destination, args.format, dtype=args.dtype, force=args.force)
    common.note(f"wrote {args.destination}")


def _resolve(name: str | None, cache_dir: Path | None) -> Path:
    from jaxserve import sources

    return sources.resolve(name or sources.DEFAULT, cache_dir=cache_dir)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value == {}:
        return "no weights here"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)} values]"
    return f"{value:,}" if isinstance(value, int) else str(value)
