"""Files in an object store (`gs://`, `s3://`), through fsspec.

An object is put whole or not at all and cannot grow, so a file that grows is put again at every
sync: outputs there are rolled into parts, and a part and its journal stay small.
"""

import io
import os
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from jaxserve.offline.codecs import MissingPackage
from jaxserve.offline.storage import Appender, retry

SCHEMES = ("gs", "gcs", "s3", "az", "abfs", "memory")
_READ = 1 << 20
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def is_remote(path: str) -> bool:
    return "://" in path


class ObjectStorage:
    """Raises OSError alone, whatever the client library raises; passing failures are repeated."""

    appends = False

    def __init__(self, address: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """`address` is any path in the store.  Raises MissingPackage without the client library,
        ValueError for a scheme that is not known."""
        scheme = address.partition("://")[0]
        if scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES[:3])
            raise ValueError(f"{address}: {scheme}:// is no storage this knows; use {known}")
        try:
            import fsspec

            self._fs: Any = fsspec.filesystem(scheme)
        except ImportError as error:
            message = f"{scheme}:// needs more packages ({error}): pip install 'jaxserve[cloud]'"
            raise MissingPackage(message) from error
        self._sleep = sleep

    def size(self, path: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            return self._call(lambda: self._fs.info(path)["size"] or 0)
        except FileNotFoundError:
            return None

    def open(self, path: str) -> BinaryIO:
        # Buffered once more: readline of fsspec's files takes no size, and a line must be bounded.
        return io.BufferedReader(self._call(lambda: self._fs.open(path, "rb")), _READ)

    def append(self, path: str, at: int) -> Appender:
        content = self._call(lambda: self._fs.cat_file(path)) if at else b""
        if len(content) < at:
            raise OSError(f"{path} has {len(content)} bytes, {at} are expected")
        if not at:
            self.put(path, b"")  # a journal is there before the results that it is of
        return _ObjectAppender(self, path, content[:at])

    def put(self, path: str, data: bytes) -> None:
        self._call(lambda: self._fs.pipe_file(path, data))

    def rename(self, source: str, target: str) -> None:
        if self.size(source) is not None:
            self._call(lambda: self._fs.cp_file(source, target))
            self.remove(source)

    def remove(self, path: str) -> None:
        try:
            self._call(lambda: self._fs.rm_file(path))
        except FileNotFoundError:
            pass

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            paths = self._call(lambda: self._fs.ls(folder, detail=False))
        except FileNotFoundError:
            return []
        return sorted({os.path.basename(path.rstrip("/")) for path in paths} - {""})

    def glob(self, pattern: str) -> list[str]:
        scheme = pattern.partition("://")[0]
        found = self._call(lambda: self._fs.glob(pattern))
        return sorted(f"{scheme}://{path.lstrip('/')}" for path in found)

    def make_folder(self, path: str) -> None:
        """There are none."""

    def remove_folder(self, path: str) -> None:
        """There are none."""

    def _call[T](self, call: Callable[[], T]) -> T:
        try:
            return retry(call, self._sleep, passes=lambda error: not isinstance(error, _FINAL))
        except _FINAL:
            raise
        except Exception as error:  # client libraries have kinds of their own
            message = " ".join(str(error).split())
            raise OSError(f"the storage failed: {message}") from error


class _ObjectAppender:
    def __init__(self, storage: ObjectStorage, path: str, content: bytes) -> None:
        self._storage = storage
        self._path = path
        self._content = bytearray(content)
        self._synced = len(content)

    @property
    def end(self) -> int:
        return len(self._content)

    def write(self, data: bytes) -> None:
        self._content += data

    def sync(self) -> None:
        if self._synced != self.end:
            self._storage.put(self._path, bytes(self._content))
            self._synced = self.end

    def close(self) -> None:
        """Nothing is held open."""
