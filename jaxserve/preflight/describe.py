"""The shapes of a model without its weights: config.json, a GGUF header, a shipped description."""

import json
from pathlib import Path
from typing import Any

from jaxserve import sources

FOLDER = "models"  # beside a config file: <owner>--<name>.json


def hf_config(name: str, config_file: Path | None) -> dict[str, Any]:
    """The Hugging Face config of a model.

    `name`: a folder with config.json, a config.json, a .gguf file, or a name that has a description
    beside the config file (`models/owner--name.json`).  Else the model's config is fetched as
    `jaxserve model pull` would, of a hub name without its weights.  Raises ValueError.
    """
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _read(path)
    if (path / "config.json").is_file():
        return _read(path / "config.json")
    if config_file is not None:
        described = config_file.parent / FOLDER / f"{name.replace('/', '--')}.json"
        if described.is_file():
            return _read(described)
    from model_zoo.weights import open_checkpoint

    if path.exists() or name.lower() in sources.PINNED:
        return open_checkpoint(sources.resolve(name)).hf_config
    return _from_hub(name, config_file)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a model's config: {error}") from error
    if not isinstance(value, dict) or "model_type" not in value:
        raise ValueError(f"{path} is no model's config: it names no model_type")
    return value


def _from_hub(name: str, config_file: Path | None) -> dict[str, Any]:
    beside = f"{config_file.parent / FOLDER}" if config_file else "no config file"
    try:
        import huggingface_hub

        huggingface_hub.utils.logging.set_verbosity_error()  # it warns at every attempt
        fetched = huggingface_hub.hf_hub_download(name, "config.json", etag_timeout=10)
    except Exception as error:  # the hub client raises many kinds, all of them long
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the shapes of {name!r} are not known: it is no path here, has no description "
            f"({beside}), and its config.json cannot be fetched: {line[:200]}"
        ) from error
    return _read(Path(fetched))
