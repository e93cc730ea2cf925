"""Orbax checkpoints: parameters as the module holds them, so that they restore into shardings.

A folder (local, or a gs:// address) holds config.json, the tokenizer's files, the manifest, and
`weights/`, an Orbax tree {dotted parameter path: array}.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from model_zoo.checkpoint import Checkpoint, Place, TensorInfo
from model_zoo.weights.account import account, check_tied, place_shape
from model_zoo.weights.fill import abstract_module, gather, numpy_dtype, param_shapes
from model_zoo.weights.manifest import Manifest, read_manifest
from model_zoo.weights.safetensors import read_json


def open_orbax(folder: Path) -> Checkpoint:
    """Opens a folder that `model convert --format orbax` wrote, under Hugging Face names.

    Raises ValueError, naming the folder, when it is damaged or does not fit its config.
    """
    config = read_json(folder / "config.json")
    manifest = read_manifest(folder)
    weights = _address(folder, manifest)
    stored = _stored(weights)
    bare = Checkpoint(str(folder), config, stored, read=lambda name: np.empty(0))
    module, places = abstract_module(bare, "float32")
    _check_shapes(weights, stored, param_shapes(module))
    by_param = sorted(places.items(), key=lambda item: item[1].path)
    infos = {name: _info(name, place, stored, manifest) for name, place in by_param}

    @functools.lru_cache(maxsize=1)  # the tensors of one parameter are read one after the other
    def param(path: str) -> np.ndarray:
        return _read_param(weights, path)

    def read(name: str) -> np.ndarray:
        place = places[name]
        part = param(place.path)[place.index]
        part = part.T if place.transpose else part
        return part.astype(numpy_dtype(infos[name].dtype), copy=False)

    return Checkpoint(
        str(folder), config, infos, read, restore=functools.partial(_restore, weights)
    )


def save_weights(checkpoint: Checkpoint, folder: Any, dtype: str | None) -> Manifest:
    """Writes the weights of `checkpoint` as an Orbax tree; the caller writes the manifest last.

    `folder` (epath.Path, absolute or gs://) must not exist.  `dtype` None keeps every tensor's own;
    a parameter then has the narrowest type that holds its tensors exactly.  The host holds the
    whole model.
    """
    module, places = abstract_module(checkpoint, "float32")
    shapes = param_shapes(module)
    plan = account(checkpoint, places, shapes)
    if plan.tied:
        check_tied(checkpoint)
    params, narrower = {}, {}
    for path, names in plan.loaded.items():
        dtypes = {name: dtype or checkpoint.infos[name].dtype for name in names}
        wide = functools.reduce(jnp.promote_types, map(numpy_dtype, dtypes.values()))
        params[path] = gather(checkpoint, names, places, (shapes[path], np.dtype(wide)))
        narrower |= {name: own for name, own in dtypes.items() if own != wide.name}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, params)
    return Manifest(dtypes=narrower)


def _address(folder: Path, manifest: Manifest) -> epath.Path:
    if "://" in manifest.weights:
        return epath.Path(manifest.weights)
    if Path(manifest.weights).name != manifest.weights:  # never leaves the folder
        raise ValueError(f"{folder}: the manifest names the weights {manifest.weights!r}")
    return epath.Path(folder.absolute()) / manifest.weights


def _stored(weights: epath.Path) -> dict[str, TensorInfo]:
    """Shapes and types of the parameters in an Orbax tree."""
    with _clear_errors(weights), ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(weights)
        tree = dict(getattr(metadata, "item_metadata", metadata))
    nested = [name for name, array in tree.items() if not hasattr(array, "shape")]
    if nested:
        raise ValueError(f"{weights} has nested parameters ({', '.join(nested[:8])})")
    return {
        path: TensorInfo(tuple(array.shape), np.dtype(array.dtype).name, np.dtype(array.dtype).name)
        for path, array in tree.items()
    }


def _check_shapes(
    weights: Any, stored: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    names = sorted({*stored, *shapes})
    found = {name: stored[name].shape if name in stored else None for name in names}
    wrong = [
        f"{name} is {found[name]}, needs {shapes.get(name)}"
        for name in names
        if found[name] != shapes.get(name)
    ]
    if wrong:
        raise ValueError(f"{weights} does not fit its config: {'; '.join(wrong[:8])}")


def _info(
    name: str, place: Place, stored: Mapping[str, TensorInfo], manifest: Manifest
) -> TensorInfo:
    param = stored[place.path]
    dtype = manifest.dtypes.get(name, param.dtype)
    return TensorInfo(place_shape(place, param.shape), dtype, dtype)


def _read_param(weights: epath.Path, path: str) -> np.ndarray:
    request = ocp.args.PyTreeRestore(
        item={path: 0},
        restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray)},
        partial_restore=True,
    )
    with _clear_errors(weights), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(weights, args=request)[path]


def _restore(weights: epath.Path, targets: dict[str, Any]) -> dict[str, jax.Array]:
    """Every parameter straight into its sharding: a host reads only what its devices hold."""
    with _clear_errors(weights), ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(weights, targets)


@contextlib.contextmanager
def _clear_errors(weights: Any) -> Iterator[None]:
    """Orbax and tensorstore raise many kinds, pages long, for a damaged folder."""
    try:
        yield
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{weights} is no whole Orbax checkpoint: {line[:200]}; convert the model again"
        ) from error
