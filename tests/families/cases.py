"""The committed checkpoints of every family; tools/make_family_checkpoints.py made them."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent / "checkpoints"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
VOCAB, LENGTH, SHORT, NUM_GREEDY = 64, 70, 40, 64
WINDOW = 13


class Case(NamedTuple):
    folder: Path
    config: dict[str, Any]  # config.json
    logits: np.ndarray  # f32[LENGTH, VOCAB] of the long prompt, from transformers without a cache
    prompts: dict[int, list[int]]  # length -> ids
    greedy: dict[int, list[int]]  # length -> 64 ids, every token computed anew at every step


@functools.cache
def case(name: str) -> Case:
    folder = FOLDER / name
    with np.load(folder / "expected.npz") as file:
        arrays = dict(file)
    return Case(
        folder=folder,
        config=json.loads((folder / "config.json").read_text()),
        logits=arrays["logits"],
        prompts={length: arrays[f"prompt.{length}"].tolist() for length in (LENGTH, SHORT)},
        greedy={length: arrays[f"greedy.{length}"].tolist() for length in (LENGTH, SHORT)},
    )
