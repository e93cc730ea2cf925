"""What the results of a job depend on, as flat settings that can be compared and named."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jaxserve import sources
from jaxserve.config import EngineConfig
from jaxserve.request import SamplingParams

SAMPLED_ABOVE = 64 << 20  # bytes; of larger files only parts are hashed
_PIECES, _PIECE = 256, 64 << 10
_BITS, _BIT_SECTIONS = "runner.deterministic", ("scheduler.", "buckets.")
_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "chat_template")


def settings_of(
    config: EngineConfig, defaults: SamplingParams, model: Path, version: str
) -> dict[str, Any]:
    """Every value is plain JSON.  `config` as the user gave it: what is derived from the machine
    does not change results, except where bits are promised.  Raises ValueError for a model whose
    manifest is damaged, OSError."""
    settings: dict[str, Any] = {"version": version, **_model_files(model)}
    sections = ["model", "sampling"]
    if config.runner.deterministic:
        sections += ["scheduler", "buckets"]
    for section in sections:
        for key, value in dataclasses.asdict(getattr(config, section)).items():
            settings[f"{section}.{key}"] = value
    settings["cache.dtype"] = config.cache.dtype
    settings[_BITS] = config.runner.deterministic
    for key, value in dataclasses.asdict(defaults).items():
        settings[f"--{key.replace('_', '-')}"] = value
    return json.loads(json.dumps(settings))


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every key whose value differs, with both values.  Not the keys that count only where bits
    are promised, when just one of the two promises them."""
    keys = old.keys() | new.keys()
    if old.get(_BITS) != new.get(_BITS):
        keys = {key for key in keys if not key.startswith(_BIT_SECTIONS)}
    return [
        f"{key} was {_shown(old.get(key))} and is {_shown(new.get(key))}"
        for key in sorted(keys)
        if old.get(key) != new.get(key)
    ]


def _model_files(path: Path) -> dict[str, str]:
    """One digest each for the tokenizer and for the rest that the model is loaded from: a job may
    write into a model's folder, and a downloader keeps notes there."""
    hashes = {"weights": hashlib.sha256(), "tokenizer": hashlib.sha256()}
    for file in sources.files_of(path):
        name = file.relative_to(path).as_posix() if path.is_dir() else file.suffix
        kind = "tokenizer" if file.name.startswith(_TOKENIZER) else "weights"
        hashes[kind].update(f"{name}\0".encode())
        hashes[kind].update(file_digest(file))
    return {kind: value.hexdigest()[:32] for kind, value in hashes.items()}


def file_digest(path: Path) -> bytes:
    """Of size and content; of a large file its beginning, its end and pieces evenly between."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8))
        if size <= SAMPLED_ABOVE:
            while data := file.read(1 << 20):
                digest.update(data)
            return digest.digest()
        digest.update(file.read(1 << 20))  # safetensors and GGUF say here what they hold
        for piece in range(1, _PIECES + 1):
            file.seek((size - _PIECE) * piece // _PIECES)
            digest.update(file.read(_PIECE))
    return digest.digest()


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
