"""The header of a GGUF file: metadata and where each tensor lies.  No jax here: the host reads the
tokenizer from it, the loaders the weights.

Format: ggml-org/ggml, docs/gguf.md, versions 2 and 3, little endian.  Every length is checked
against the size of the file before anything of that length is read, so a damaged file costs no
memory.  (The reader of the `gguf` package builds an array per vocabulary entry: 2.3 s for 49,152.)
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {  # value type -> struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


class GGUFTensor(NamedTuple):
    shape: tuple[int, ...]  # row-major, as numpy has it: the reverse of the file's order
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile(NamedTuple):
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, u8[num_bytes], a view of the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.offset)


class _Cursor:
    """Reads forward through the header, and refuses to read past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def fail(self, reason: str) -> ValueError:
        return ValueError(f"{self.path}: damaged GGUF file: {reason}; fetch the file again")

    def take(self, count: int, what: str) -> int:
        """Moves past `count` bytes; returns where they begin."""
        start = self.at
        if count > self.size - start:
            raise self.fail(f"{what} at byte {start} runs past the end ({self.size} bytes)")
        self.at = start + count
        return start

    def scalar(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """A vocabulary is a hundred thousand of these, so no call for each."""
        data, size, at, length_of = self.data, self.size, self.at, struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            start = at + 8
            end = start + length_of(data, at)[0] if start <= size else size + 1
            if end > size:
                where = start if start <= size else at
                raise self.fail(f"{what} at byte {where} runs past the end ({size} bytes)")
            try:
                found.append(data[start:end].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise self.fail(f"{what} at byte {start} is not UTF-8") from error
            at = end
        self.at = at
        return found

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], key)
        if kind == _ARRAY:
            return self.array(key)
        raise self.fail(f"metadata {key!r} has the unknown value type {kind}")

    def array(self, key: str) -> list[Any]:
        kind, count = self.scalar("<I", key), self.scalar("<Q", key)
        if kind == _STRING:
            if count > (self.size - self.at) // 8:
                raise self.fail(f"metadata {key!r} claims {count} strings")
            return self.strings(count, key)
        if kind not in _SCALARS:
            raise self.fail(f"metadata {key!r} is an array of the unknown value type {kind}")
        form = _SCALARS[kind]
        start = self.take(count * struct.calcsize(form), key)
        return np.frombuffer(self.data, np.dtype(form), count, start).tolist()


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of a GGUF file.

    Raises ValueError, naming the file, when it is not GGUF, is damaged or truncated, or is of a
    version or byte order that is not supported.
    """
    data = _map(path)
    cursor = _Cursor(data, path)
    if data[:4] != _MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it begins with {data[:4]!r}, not {_MAGIC!r}")
    cursor.take(4, "magic")
    version = cursor.scalar("<I", "version")
    if version not in _VERSIONS:
        order = " (big endian)" if version & 0xFFFF == 0 else ""
        raise ValueError(
            f"{path} is GGUF version {version}{order}; supported: versions 2 and 3, little endian"
        )
    num_tensors = cursor.scalar("<Q", "tensor count")
    num_keys = cursor.scalar("<Q", "key count")
    metadata = _read_metadata(cursor, num_keys)
    tensors = _read_tensors(cursor, num_tensors, metadata)
    return GGUFFile(path, metadata, tensors, data)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        if path.stat().st_size < len(_MAGIC):
            raise ValueError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string("metadata key")
        if key in metadata:
            raise cursor.fail(f"metadata {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar("<I", key), key)
    return metadata


def _read_tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(count):
        name = cursor.string("tensor name")
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice")
        tensors[name] = _read_tensor(cursor, name)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment
    placed = {name: t._replace(offset=start + t.offset) for name, t in tensors.items()}
    for name, tensor in placed.items():
        if tensor.offset + tensor.num_bytes > cursor.size:
            raise cursor.fail(
                f"tensor {name!r} ends at byte {tensor.offset + tensor.num_bytes}, "
                f"the file at {cursor.size} (truncated?)"
            )
    return placed


def _read_tensor(cursor: _Cursor, name: str) -> GGUFTensor:
    """One entry of the tensor table; its offset is still relative to the data section."""
    num_dims = cursor.scalar("<I", name)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.scalar("<Q", name) for _ in range(num_dims))[::-1]
    number = cursor.scalar("<I", name)
    offset = cursor.scalar("<Q", name)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.fail(f"tensor {name!r} has the unknown type {number}") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or 0 in shape:
        raise cursor.fail(f"tensor {name!r} of type {kind.name} has the impossible shape {shape}")
    return GGUFTensor(shape, kind, offset, math.prod(shape) // block * block_bytes)
