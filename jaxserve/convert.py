"""A model of any kind -> a folder of one kind: weights, config and tokenizer."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.sources import MODEL_FILES
from jaxserve.text.tokenizer import load_tokenizer
from model_zoo.weights import Checkpoint, open_checkpoint

FORMATS = ("safetensors", "orbax")


def convert(
    source: Path, destination: str, form: str, *, dtype: str | None = None, force: bool = False
) -> None:
    """Writes the model at `source` as `form` (safetensors or orbax) into the folder `destination`.

    `dtype` None keeps every value bit for bit (quantised weights become the float32 they stand
    for).  `destination` appears whole or not at all; an existing one is replaced only with
    `force`, and only when it is a model folder.  An Orbax destination may be a gs:// address.
    Raises ValueError.
    """
    checkpoint = open_checkpoint(source)
    if "://" in destination:
        _convert_remote(checkpoint, source, destination, form, dtype)
        return
    with _whole_folder(Path(destination), force=force) as folder:
        _write_small_files(checkpoint, source, folder, dtype)
        if form == "orbax":
            _write_orbax(checkpoint, folder, dtype)
        else:
            from model_zoo.weights.save import save_safetensors

            save_safetensors(checkpoint, folder / "model.safetensors", dtype)


def _write_orbax(checkpoint: Checkpoint, folder: Any, dtype: str | None) -> None:
    """`folder`: a Path or an epath.Path."""
    from etils import epath

    from model_zoo.weights.manifest import WEIGHTS, write_manifest
    from model_zoo.weights.orbax import save_weights

    manifest = save_weights(checkpoint, epath.Path(folder) / WEIGHTS, dtype)
    write_manifest(folder, manifest)  # last: a folder with a manifest is whole


def _convert_remote(
    checkpoint: Checkpoint, source: Path, address: str, form: str, dtype: str | None
) -> None:
    from etils import epath

    if form != "orbax":
        raise ValueError(f"{address}: only --format orbax can be written to an address")
    remote = epath.Path(address)
    if remote.exists():
        raise ValueError(f"{address} exists; choose another address or delete it first")
    with tempfile.TemporaryDirectory() as folder:
        _write_small_files(checkpoint, source, Path(folder), dtype)
        remote.mkdir(parents=True)
        for path in sorted(Path(folder).iterdir()):
            (remote / path.name).write_bytes(path.read_bytes())
    _write_orbax(checkpoint, remote, dtype)


def _write_small_files(
    checkpoint: Checkpoint, source: Path, folder: Path, dtype: str | None
) -> None:
    """Config and tokenizer."""
    if source.is_dir():
        for name in MODEL_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    else:
        load_tokenizer(source).save(folder)
    config = dict(checkpoint.hf_config)
    if dtype:
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextlib.contextmanager
def _whole_folder(destination: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside `destination` that takes its name when the body has ended well."""
    destination = destination.expanduser().absolute()
    if destination.exists():
        _refuse_to_replace(destination, force)
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        folder = work / "new"
        folder.mkdir()
        yield folder
        if destination.exists():
            destination.rename(work / "old")
        folder.rename(destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_to_replace(destination: Path, force: bool) -> None:
    if not destination.is_dir() or not (
        (destination / "config.json").exists() or not any(destination.iterdir())
    ):
        raise ValueError(f"{destination} exists and is no model folder; choose another name")
    if any(destination.iterdir()) and not force:
        raise ValueError(f"{destination} exists; choose another name or add --force")
