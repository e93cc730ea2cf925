"""Where the files of a batch job live: the calls of the operating system behind one interface that
survives what network file systems do, and that object stores can offer too (`remote.py`).

A call that fails for a passing reason is repeated with growing pauses, and every call is made so
that repeating it is harmless: writes go to a fixed offset, and when a sync fails everything since
the last good one is written again (a kernel may have dropped it).
"""

import errno
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

RETRY_PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds before the second, third, ... try
_PASSING = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOLINK, errno.EREMOTEIO, errno.EPROTO),
}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Appender(Protocol):
    """A file that only grows."""

    @property
    def end(self) -> int:
        """Bytes it holds, with what was written here."""
        ...

    def write(self, data: bytes) -> None: ...

    def sync(self) -> None:
        """Everything written before is durable when this returns."""
        ...

    def close(self) -> None:
        """Without a sync.  Idempotent."""
        ...


class Storage(Protocol):
    """Paths are strings.  Every method raises OSError; what it did before that may be repeated."""

    appends: bool  # False: every sync writes the whole file again, so files must stay small

    def size(self, path: str) -> int | None:
        """None when there is no such file."""
        ...

    def open(self, path: str) -> BinaryIO:
        """For reading, from the start."""
        ...

    def append(self, path: str, at: int) -> Appender:
        """Cuts the file to `at` bytes and goes on from there; 0 makes it when it is not there."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """The whole content of a small file, at once or not at all."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Replaces `target`; nothing happens when `source` is gone, so it can be repeated."""
        ...

    def remove(self, path: str) -> None:
        """Nothing happens when it is gone."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted; empty when there is none."""
        ...

    def make_folder(self, path: str) -> None: ...

    def remove_folder(self, path: str) -> None:
        """An empty one."""
        ...


class Os:
    """The calls themselves.  Tests put ones in their place that fail, die and forget."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    pread = staticmethod(os.pread)
    pwrite = staticmethod(os.pwrite)
    fsync = staticmethod(os.fsync)
    ftruncate = staticmethod(os.ftruncate)
    replace = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    listdir = staticmethod(os.listdir)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def size(path: str) -> int | None:
        try:
            return os.stat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None


def _passes(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _PASSING


def retry[T](
    call: Callable[[], T],
    sleep: Callable[[float], None],
    again: Callable[[], None] = lambda: None,
    passes: Callable[[Exception], bool] = _passes,
) -> T:
    """What `call` returns; after a failure that `passes` it is called again, a bounded number of
    times, with `again` before each."""
    for pause in RETRY_PAUSES:
        try:
            return call()
        except Exception as error:
            if not passes(error):
                raise
        sleep(pause)
        again()
    return call()


def may_work_later(error: OSError) -> bool:
    """The disk is full or away; nothing is wrong with the call itself."""
    return error.errno in _PASSING | _FULL


class LocalStorage:
    """Files of this machine, or of a file system that is mounted."""

    appends = True

    def __init__(self, system: Os | None = None) -> None:
        self._os = system or Os()

    def size(self, path: str) -> int | None:
        return self._retry(lambda: self._os.size(path))

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(_Raw(self._os, path), 1 << 20)

    def append(self, path: str, at: int) -> Appender:
        return _LocalAppender(self._os, path, at)

    def put(self, path: str, data: bytes) -> None:
        side = f"{path}.new"
        file = self.append(side, 0)
        try:
            file.write(data)
            file.sync()
        finally:
            file.close()
        self.rename(side, path)

    def rename(self, source: str, target: str) -> None:
        def replace() -> None:
            if self._os.size(source) is not None:
                self._os.replace(source, target)

        self._retry(replace)
        for folder in {os.path.dirname(source), os.path.dirname(target)}:
            sync_folder(self._os, folder)

    def remove(self, path: str) -> None:
        def unlink() -> None:
            if self._os.size(path) is not None:
                self._os.unlink(path)

        self._retry(unlink)

    def names(self, folder: str) -> list[str]:
        if self.size(folder) is None:
            return []
        return sorted(self._retry(lambda: self._os.listdir(folder)))

    def make_folder(self, path: str) -> None:
        def mkdir() -> None:
            if self._os.size(path) is None:
                self._os.mkdir(path)

        self._retry(mkdir)
        sync_folder(self._os, os.path.dirname(path))

    def remove_folder(self, path: str) -> None:
        self._os.rmdir(path)

    def _retry[T](self, call: Callable[[], T]) -> T:
        return retry(call, self._os.sleep)


def sync_folder(system: Os, folder: str) -> None:
    """Makes the names in a folder durable, where the file system knows how."""

    def sync() -> None:
        fd = system.open(folder or ".", os.O_RDONLY)
        try:
            system.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            system.close(fd)

    retry(sync, system.sleep)


class _LocalAppender:
    def __init__(self, system: Os, path: str, at: int) -> None:
        self._os = system
        self._path = path
        self._fd: int | None = None
        self._synced = self.end = at
        self._unsynced = bytearray()  # in case a sync fails
        is_new = retry(lambda: system.size(path), system.sleep) is None
        if is_new and at:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        try:
            retry(self._cut, system.sleep, self._reopen)
            if is_new:
                sync_folder(system, os.path.dirname(path))
        except BaseException:
            self.close()
            raise

    def write(self, data: bytes) -> None:
        start, self.end = self.end, self.end + len(data)
        self._unsynced += data
        retry(lambda: self._write_at(start, data), self._os.sleep, self._reopen)

    def sync(self) -> None:
        if self._synced == self.end:
            return

        def recover() -> None:
            self._reopen()
            self._write_at(self._synced, bytes(self._unsynced))

        retry(lambda: self._os.fsync(self._open()), self._os.sleep, recover)
        self._synced = self.end
        self._unsynced.clear()

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._os.close(fd)

    def _cut(self) -> None:
        self._os.ftruncate(self._open(), self.end)
        self._os.fsync(self._open())

    def _open(self) -> int:
        if self._fd is None:
            self._fd = self._os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._fd

    def _reopen(self) -> None:
        try:
            self.close()
        except OSError:  # a handle that went stale; the next write tells
            pass

    def _write_at(self, start: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = self._os.pwrite(self._open(), left, start)
            left, start = left[written:], start + written


class _Raw(io.RawIOBase):
    """Reads a file by offset, so that a read that failed can be repeated on a fresh handle."""

    def __init__(self, system: Os, path: str) -> None:
        self._os = system
        self._path = path
        self._at = 0
        self._fd: int | None = None
        retry(self._open, system.sleep)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 2:
            offset += self._os.size(self._path) or 0
        self._at = offset + (self._at if whence == 1 else 0)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = retry(
            lambda: self._os.pread(self._open(), len(buffer), self._at),
            self._os.sleep,
            self._close,
        )
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._close()

    def _open(self) -> int:
        if self._fd is None:
            self._fd = self._os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._os.close(fd)


def read_all(storage: Storage, path: str) -> bytes:
    with storage.open(path) as file:
        return file.read()


def local(path: str | Path) -> str:
    """The path as it is kept: absolute, so that a changed working folder does not matter."""
    return os.path.abspath(path)
