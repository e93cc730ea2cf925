"""Weights of every file format: open a checkpoint, load a module from it.

Opening needs no jax; loading does, and is imported when used.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_zoo.checkpoint import Checkpoint
from model_zoo.weights.gguf import open_gguf
from model_zoo.weights.manifest import has_manifest
from model_zoo.weights.safetensors import open_safetensors

__all__ = ["Checkpoint", "load_module", "open_checkpoint"]

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file, a folder of safetensors, or a folder that `model convert` wrote as Orbax.

    Reads headers only.  Raises ValueError, naming the file, when it is missing, damaged, a pickle,
    or nothing that is known.
    """
    if path.is_dir() and has_manifest(path):
        from model_zoo.weights.orbax import open_orbax

        return open_orbax(path)
    if path.is_dir():
        return open_safetensors(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a model folder or a .gguf file")
    return _open_file(path)


def load_module(
    checkpoint: Checkpoint,
    dtype: str,
    shardings: Mapping[str, Any] | None = None,
    *,
    max_len: int = 0,
    kv_copies: int = 1,
    int8: bool = False,
) -> Any:
    """See `model_zoo.weights.fill.load_module`."""
    from model_zoo.weights import fill

    return fill.load_module(
        checkpoint, dtype, shardings, max_len=max_len, kv_copies=kv_copies, int8=int8
    )


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in _PICKLES:
        raise ValueError(
            f"{path} is a pickle, which can run code and is never read; convert it to safetensors"
        )
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} is one file of a model; give its folder, {path.parent}")
    return open_gguf(path)
