"""Compressed files of lines, known by their suffix.  A block is a gzip member or a zstd frame of
its own, so that a file can grow block by block and any tool reads it as one."""

import gzip
import io
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol, cast

_FED = 2048  # bytes that a decoder of frames is given at a time; at worst 64 MiB come out
LEVEL = 6  # of gzip; zstd has its default


class MissingPackage(ValueError):
    """An optional package is needed; the message says which."""


class Codec(Protocol):
    def encode(self, data: bytes) -> bytes: ...

    def decode(self, block: bytes) -> bytes: ...

    def reader(self, file: BinaryIO) -> BinaryIO:
        """Reads decoded bytes.  Damage is an OSError."""
        ...


class Plain:
    def encode(self, data: bytes) -> bytes:
        return data

    def decode(self, block: bytes) -> bytes:
        return block

    def reader(self, file: BinaryIO) -> BinaryIO:
        return file


class Gzip:
    def encode(self, data: bytes) -> bytes:
        return gzip.compress(data, LEVEL, mtime=0)

    def decode(self, block: bytes) -> bytes:
        return gzip.decompress(block)

    def reader(self, file: BinaryIO) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Checked(gzip.GzipFile(fileobj=file)), 1 << 20))


class Zstd:
    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            message = "a .zst file needs the package zstandard: pip install 'jaxserve[zstd]'"
            raise MissingPackage(message) from error
        self._zstd: Any = zstandard

    def encode(self, data: bytes) -> bytes:
        return self._zstd.ZstdCompressor().compress(data)

    def decode(self, block: bytes) -> bytes:
        return self._zstd.ZstdDecompressor().decompress(block)

    def reader(self, file: BinaryIO) -> BinaryIO:
        stream = _Frames(file, self._zstd.ZstdDecompressor().decompressobj)
        return cast(BinaryIO, io.BufferedReader(_Checked(stream), 1 << 20))


def codec_of(path: str) -> Codec:
    """Raises MissingPackage for a .zst file without zstandard."""
    if path.endswith(".gz"):
        return Gzip()
    return Zstd() if path.endswith(".zst") else Plain()


class _Frames:
    """Frames one after the other.  zstandard's own reader takes one that is cut off for the end of
    the file, and lines would be missing in silence."""

    def __init__(self, file: BinaryIO, new_frame: Callable[[], Any]) -> None:
        self._file, self._new_frame = file, new_frame
        self._frame: Any = None  # None between frames
        self._fed = b""  # not decoded yet
        self._data = memoryview(b"")  # decoded

    def read(self, size: int) -> memoryview:
        while not self._data:
            self._fed = self._fed or self._file.read(_FED)
            if not self._fed:
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                break
            self._frame = self._frame or self._new_frame()
            self._data = memoryview(self._frame.decompress(self._fed))
            self._fed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        data, self._data = self._data[:size], self._data[size:]
        return data


class _Checked(io.RawIOBase):
    """Turns what decoders raise for damaged data into OSError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._stream.read(len(buffer))
        except OSError:
            raise
        except Exception as error:  # EOFError, zlib.error, zstandard.ZstdError
            raise OSError(f"the compressed data is damaged or cut off: {error}") from error
        buffer[: len(data)] = data
        return len(data)
