"""Hugging Face folders: config.json and one or several safetensors files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from model_zoo.checkpoint import Checkpoint, TensorInfo

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {  # the file's name -> numpy's; others can be listed but not read
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def open_safetensors(folder: Path) -> Checkpoint:
    """Opens a folder of safetensors files (one, or shards named by an index).

    Raises ValueError, naming the file, for a missing or damaged file, for an index that does not
    agree with its shards, and for a folder that has only pickled weights.
    """
    config = read_json(folder / "config.json")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unnamed method")
        raise ValueError(
            f"{folder}: the weights are quantised by {method}, which is not supported; "
            f"use an unquantised copy or a GGUF file"
        )
    infos: dict[str, TensorInfo] = {}
    readers: dict[str, Any] = {}
    for path in _files(folder):
        for name, info, file in _open_file(path):
            if name in infos:
                raise ValueError(f"{path}: tensor {name} is also in another shard of {folder}")
            infos[name], readers[name] = info, file
    _check_index(folder, infos)
    return Checkpoint(
        str(folder),
        config,
        infos,
        read=lambda name: readers[name].get_tensor(name),
        read_part=lambda name, part: readers[name].get_slice(name)[part],
    )


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError, naming the file, when it is missing or holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; a model folder needs it") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        return [_shard(folder, name) for name in sorted(set(_weight_map(folder).values()))]
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ValueError(f"{folder} has {len(found)} safetensors files but no {_INDEX}")
    raise ValueError(f"{folder} holds no safetensors weights{_pickle_hint(folder)}")


def _pickle_hint(folder: Path) -> str:
    for suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
        for path in sorted(folder.glob(f"*{suffix}")):
            return (
                f"; {path.name} is a pickle, which can run code and is never read: "
                f"convert it to safetensors"
            )
    return ""


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder / _INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / _INDEX} has no weight_map")
    return weight_map


def _shard(folder: Path, name: str) -> Path:
    if not isinstance(name, str) or Path(name).name != name:  # never leaves the folder
        raise ValueError(f"{folder / _INDEX} names the shard {name!r}, which is no plain file name")
    if not (folder / name).is_file():
        raise ValueError(f"{folder / _INDEX} names the shard {name}, which is missing")
    return folder / name


def _open_file(path: Path) -> Iterable[tuple[str, TensorInfo, Any]]:
    try:
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: damaged safetensors file: {error} ({path.stat().st_size} bytes); "
            f"fetch the file again"
        ) from error
    for name in file.keys():  # noqa: SIM118 (not a dict)
        view = file.get_slice(name)
        code = str(view.get_dtype())
        dtype = _DTYPES.get(code, code)
        yield name, TensorInfo(tuple(view.get_shape()), dtype, dtype), file


def _check_index(folder: Path, infos: dict[str, TensorInfo]) -> None:
    if not (folder / _INDEX).exists():
        return
    missing = [name for name in _weight_map(folder) if name not in infos]
    if missing:
        raise ValueError(
            f"{folder / _INDEX} names {len(missing)} tensors that no shard holds: "
            f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}"
        )


def write_safetensors(
    path: Path, infos: dict[str, TensorInfo], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes one safetensors file, a tensor at a time.

    `tensors` yields every name of `infos` in its order, with that shape and dtype; memory holds
    one tensor.  Format: huggingface/safetensors README: header length, JSON header, data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in infos.items():
        size = int(np.prod(info.shape, dtype=np.int64)) * _dtype(info.dtype).itemsize
        header[name] = {
            "dtype": _CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, array in tensors:
            np.ascontiguousarray(array).view(np.uint8).tofile(file)


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))
