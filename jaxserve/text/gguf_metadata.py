"""Reads the key-value metadata of a GGUF file, and nothing after it.

`gguf.GGUFReader` makes several numpy arrays for every string of a vocabulary (2.5 s for 49,152
tokens on two slow cores); a command that only needs the tokenizer cannot wait for that.  Layout:
the GGUF specification, version 3, in ggml's docs/gguf.md (version 2 differs only in what is not
read here).
"""

import mmap
import struct
from pathlib import Path

type Scalar = bool | int | float | str
type Value = Scalar | list[Value]

_SCALARS = {  # value type -> struct format, little endian
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING = 8
_ARRAY = 9
_VERSIONS = (2, 3)


def read_metadata(path: Path) -> dict[str, Value]:
    """All keys of the file.  Raises ValueError when it is no little-endian GGUF of version 2 or 3,
    or is cut off."""
    with path.open("rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ValueError(f"{path} is empty; a GGUF file was expected") from None
        with view:
            return _Reader(view, path).read()


class _Reader:
    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self._view = view
        self._path = path
        self._offset = 0

    def read(self) -> dict[str, Value]:
        if self._view[:4] != b"GGUF":
            raise ValueError(f"{self._path} is no GGUF file (it does not begin with 'GGUF')")
        self._offset = 4
        try:
            version = int(self._scalar("I"))
            if version not in _VERSIONS:
                raise ValueError(
                    f"{self._path} is GGUF version {version} or big-endian; "
                    f"little-endian versions {_VERSIONS} can be read; convert the file again"
                )
            self._scalar("Q")  # number of tensors
            count = int(self._scalar("Q"))
            return {self._string(): self._value(int(self._scalar("I"))) for _ in range(count)}
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"{self._path}: GGUF metadata is damaged near byte {self._offset} ({error}); "
                f"fetch the file again"
            ) from None

    def _scalar(self, form: str) -> int | float | bool:
        (value,) = struct.unpack_from("<" + form, self._view, self._offset)
        self._offset += struct.calcsize("<" + form)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """`count` strings, each its length in bytes (u64) and its UTF-8."""
        view, offset, length_of = self._view, self._offset, struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            (length,) = length_of(view, offset)
            offset += 8
            data = view[offset : offset + length]
            if len(data) != length:
                raise struct.error("a string goes past the end of the file")
            strings.append(data.decode("utf-8"))
            offset += length
        self._offset = offset
        return strings

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(self._form(kind))

    def _array(self) -> list[Value]:
        kind, count = int(self._scalar("I")), int(self._scalar("Q"))
        if count > len(self._view):
            raise struct.error(f"an array of {count} values goes past the end of the file")
        if kind == _STRING:
            return [*self._strings(count)]
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        form = struct.Struct(f"<{count}{self._form(kind)}")
        values = form.unpack_from(self._view, self._offset)
        self._offset += form.size
        return list(values)

    def _form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        return _SCALARS[kind]
