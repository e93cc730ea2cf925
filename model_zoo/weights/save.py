"""Writing the weights of any checkpoint as one safetensors file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from model_zoo.checkpoint import Checkpoint
from model_zoo.weights.account import account, check_tied
from model_zoo.weights.fill import abstract_module, numpy_dtype, param_shapes
from model_zoo.weights.safetensors import write_safetensors


def save_safetensors(checkpoint: Checkpoint, path: Path, dtype: str | None) -> None:
    """Writes every tensor that the model loads under its Hugging Face name.

    `dtype` None keeps each tensor's own (float32 for quantised ones).  A head that is a copy of the
    embedding and what the config makes redundant are left out.  Memory holds one tensor.  Raises
    ValueError when the checkpoint does not fit its config.
    """
    module, places = abstract_module(checkpoint, "float32")
    plan = account(checkpoint, places, param_shapes(module))
    if plan.tied:
        check_tied(checkpoint)
    infos = {
        name: info._replace(dtype=dtype or info.dtype)
        for name, info in checkpoint.infos.items()
        if name in places
    }

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, info in infos.items():
            yield name, checkpoint.read(name).astype(numpy_dtype(info.dtype), copy=False)

    write_safetensors(path, infos, tensors())
