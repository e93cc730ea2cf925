"""`jaxserve serve`: an OpenAI-compatible server."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common
from jaxserve.cli.cold_start import ColdStart

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.server.files_batches import FilesAndBatches
    from jaxserve.server.keys import Keys
    from jaxserve.server.service import Service

TEXT_TOKENS = 16  # of a completion that names no max_tokens, as in OpenAI's API


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API",
        description=(
            "Serves the model over HTTP: /v1/chat/completions, /v1/completions, /v1/models, "
            "/tokenize, /detokenize, /health, /ready, /metrics, /openapi.json, a page at /, and "
            "with --files /v1/files and /v1/batches.  The engine runs in a process of its own.  "
            "SIGTERM or Ctrl-C: nothing new is taken, what is in flight has server.grace_s "
            "seconds, exit code 0.  Limits are the settings server.* (`jaxserve config`)."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; default %(default)s"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="default %(default)s; 0: a free one"
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="only who sends one of its keys (one a line) is served; default: everybody",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what requests call the model; may be repeated; default: the name it was loaded by",
    )
    parser.add_argument(
        "--restart-engine",
        action="store_true",
        help="start the engine again when it dies or stays stuck; otherwise /health says so",
    )
    parser.add_argument(
        "--files",
        type=Path,
        metavar="FOLDER",
        help="offer /v1/files and /v1/batches, kept in FOLDER; batches go on after a restart",
    )
    common.add_engine_options(parser)
    common.add_deadline_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.port < 65536:
        raise common.UsageError(f"--port {args.port} must be from 0 to 65535")
    config = common.read_config(args)
    try:
        from jaxserve.server import serve
        from jaxserve.server.engine_client import EngineFailed
    except ImportError as error:
        message = f"serving needs {error.name}: pip install 'jaxserve[server]'"
        raise common.UsageError(message) from error
    common.start_logging(args.verbose)
    keys = _keys(args.api_key_file)
    service = _service(args, config, keys)
    files = _files(args.files, service)
    try:
        listener = serve.listen(args.host, args.port)
    except OSError as error:
        message = f"cannot listen at {args.host}, port {args.port}: {error.strerror or error}"
        raise common.UsageError(message) from error
    port = listener.getsockname()[1]
    common.note(f"http://{_shown(args.host)}:{port} answers; /ready says when the model does")
    if keys is None and not serve.is_loopback(args.host):
        common.note(
            f"warning: whoever reaches {args.host}:{port} can use this server; "
            f"--api-key-file asks for keys"
        )
    try:
        serve.run(service, listener, files, common.note)
    except (EngineFailed, OSError, TimeoutError) as error:
        raise common.UsageError(common.one_line(error)) from error
    common.note("stopped")
    return common.DONE


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _keys(path: Path | None) -> "Keys | None":
    from jaxserve.server import keys

    if path is None:
        return None
    try:
        return keys.read(path)
    except (OSError, ValueError) as error:
        raise common.UsageError(f"--api-key-file: {common.one_line(error)}") from error


def _files(folder: Path | None, service: "Service") -> "FilesAndBatches | None":
    from jaxserve.offline.errors import InputError
    from jaxserve.server.files_batches import FilesAndBatches

    if folder is None:
        return None
    try:
        return FilesAndBatches(service, folder)
    except (InputError, OSError, ValueError) as error:
        raise common.UsageError(f"--files {folder}: {common.one_line(error)}") from error


def _service(args: argparse.Namespace, config: "EngineConfig", keys: "Keys | None") -> "Service":
    """Raises UsageError for a model that is not there."""
    from jaxserve import sources
    from jaxserve.request import MAX_INT
    from jaxserve.server.engine_client import EngineClient, Hooks
    from jaxserve.server.protocol import Load
    from jaxserve.server.service import Service
    from jaxserve.server.text_client import TextClient
    from jaxserve.text.tokenizer import load_tokenizer

    try:
        path = sources.resolve(config.model.name)
        tokenizer = load_tokenizer(Path(path))
    except (ValueError, OSError) as error:
        raise common.UsageError(common.one_line(error)) from error
    names = args.served_model_name or [config.model.name]
    load = Load(str(path), names, chat_max_tokens=MAX_INT, text_max_tokens=TEXT_TOKENS)
    limits = config.server
    cold = ColdStart(sys.stderr, "later starts are faster")
    hooks = Hooks(
        note=common.log if args.verbose else common.log_warning,
        on_compile=cold.update,
        on_ready=lambda seconds: _ready(cold, names[0], seconds),
    )
    engine = EngineClient(config, tokenizer, restart=args.restart_engine, hooks=hooks)
    text = TextClient(load, count=limits.text_processes, limit_s=limits.text_s)
    return Service(engine, text, tokenizer, names, keys)


def _ready(cold: ColdStart, name: str, seconds: float) -> None:
    cold.close()
    common.note(f"{name} is ready (start {seconds:.1f} s)")
