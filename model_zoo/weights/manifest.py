"""jaxserve.json: says that a folder holds an Orbax checkpoint of ours, and where its weights are.

It is written last, so that a folder with a manifest is a whole one.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_zoo.weights.safetensors import read_json

MANIFEST, WEIGHTS = "jaxserve.json", "weights"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    weights: str = WEIGHTS  # the Orbax folder: inside the model's folder, or a whole address
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """HF name -> dtype of tensors that were narrower than the parameter they are part of."""


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def write_manifest(folder: Any, manifest: Manifest) -> None:
    """`folder`: a Path or an epath.Path."""
    fields = {"format": _FORMAT} | dataclasses.asdict(manifest)
    (folder / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n")


def read_manifest(folder: Any) -> Manifest:
    """Raises ValueError, naming the file, when it is damaged or of another format."""
    fields = read_json(folder / MANIFEST)
    if fields.get("format") != _FORMAT:
        raise ValueError(
            f"{folder / MANIFEST} has format {fields.get('format')!r}, this version reads "
            f"{_FORMAT}; convert the model again"
        )
    weights, dtypes = fields.get("weights"), fields.get("dtypes")
    if not isinstance(weights, str) or not isinstance(dtypes, dict):
        raise ValueError(f"{folder / MANIFEST} is damaged; convert the model again")
    return Manifest(weights, dtypes)
