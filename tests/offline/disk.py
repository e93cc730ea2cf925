"""A disk in memory that fails, dies and forgets: what `storage.Os` offers, call by call.

Every call is counted.  At the k-th one a fault happens: it fails once as a network file system
does, the disk is full from then on, or the process dies in the middle of it.  A power loss keeps
what was synced, and of the rest any part, torn and in any order.
"""

import dataclasses
import errno
import os
import random
from typing import Any

SECTOR = 16  # bytes that are written whole or not at all


class Died(BaseException):
    """The process is gone."""


@dataclasses.dataclass(eq=False)
class File:
    data: bytearray = dataclasses.field(default_factory=bytearray)  # as processes see it
    durable: bytearray = dataclasses.field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = dataclasses.field(default_factory=list)
    is_folder: bool = False


class Disk:
    def __init__(self) -> None:
        root = File(is_folder=True)
        self.names: dict[str, File] = {"/": root, "/job": File(is_folder=True)}
        self.durable_names = dict(self.names)
        self.pending_names: list[tuple[str, str, File | None]] = []  # folder, path, what it is now
        self.handles: dict[int, tuple[str, File]] = {}
        self.calls = 0
        self.log: list[str] = []
        self.fault_at: int | None = None
        self.fault = ""
        self.is_full = False

    def arm(self, fault: str, at: int) -> None:
        self.calls, self.log, self.fault, self.fault_at = 0, [], fault, at

    def disarm(self) -> None:
        self.fault_at, self.is_full = None, False
        self.handles.clear()

    def read(self, path: str) -> bytes:
        return bytes(self.names[path].data) if path in self.names else b""

    def install(self, path: str, data: bytes) -> None:
        file = File(bytearray(data), bytearray(data))
        self.names[path] = self.durable_names[path] = file

    def lose_power(self, rng: random.Random) -> None:
        kept = rng.randint(0, len(self.pending_names))
        self.names = dict(self.durable_names)
        for _, path, file in self.pending_names[:kept]:
            _set(self.names, path, file)
        self.pending_names.clear()
        self.durable_names = dict(self.names)
        for file in self.names.values():
            pieces = [piece for change in file.pending for piece in _pieces(change)]
            rng.shuffle(pieces)
            for start, data in pieces[: rng.randint(0, len(pieces))]:
                _apply(file.durable, start, data)
            file.data = bytearray(file.durable)
            file.pending.clear()
        self.handles.clear()

    # What storage.Os has.

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        self._call("open")
        if path not in self.names:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self._room()
            self._name(path, File())
        fd = max(self.handles, default=2) + 1
        self.handles[fd] = (path, self.names[path])
        return fd

    def close(self, fd: int) -> None:
        self.handles.pop(fd, None)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._call("read")
        return bytes(self._file(fd).data[offset : offset + length])

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        data = bytes(data)
        file = self._file(fd)
        half = data[: len(data) // 2]
        self._call("write", lambda: self._change(file, offset, half))
        if self.is_full:
            self._change(file, offset, half)
            self._room()
        self._change(file, offset, data)
        return len(data)

    def fsync(self, fd: int) -> None:
        path, file = self.handles[fd] if fd in self.handles else self._stale()
        # A sync that fails drops what it could not write, and the next one says nothing of it.
        self._call("sync", file.pending.clear if self.fault == "fails" else None)
        if file.is_folder:
            for folder, name, what in self.pending_names:
                if folder == path:
                    _set(self.durable_names, name, what)
            self.pending_names = [entry for entry in self.pending_names if entry[0] != path]
        else:
            for start, data in file.pending:
                _apply(file.durable, start, data)
            file.pending.clear()

    def ftruncate(self, fd: int, length: int) -> None:
        self._call("truncate")
        file = self._file(fd)
        if len(file.data) != length:
            self._change(file, length, None)

    def replace(self, source: str, target: str) -> None:
        self._call("rename")
        file = self.names[source]
        self._name(target, file)
        self._name(source, None)

    def unlink(self, path: str) -> None:
        self._call("unlink")
        self._name(path, None)

    def mkdir(self, path: str) -> None:
        self._call("mkdir")
        self._room()
        self._name(path, File(is_folder=True))

    def rmdir(self, path: str) -> None:
        self._call("rmdir")
        self._name(path, None)

    def listdir(self, path: str) -> list[str]:
        self._call("list")
        prefix = path.rstrip("/") + "/"
        return [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]

    def size(self, path: str) -> int | None:
        self._call("stat")
        file = self.names.get(path)
        return None if file is None else len(file.data)

    def sleep(self, seconds: float) -> None:
        pass

    def _call(self, name: str, before_fault: Any = None) -> None:
        at, self.calls = self.calls, self.calls + 1
        self.log.append(name)
        if at != self.fault_at:
            return
        if self.fault == "full":
            self.is_full = True
            return
        if before_fault is not None:
            before_fault()
        if self.fault == "fails":
            raise OSError(errno.EIO, f"the network is gone for a moment ({name})")
        raise Died(name)

    def _room(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _file(self, fd: int) -> File:
        return self.handles[fd][1] if fd in self.handles else self._stale()

    def _stale(self) -> Any:
        raise OSError(errno.EBADF, "bad handle")

    def _change(self, file: File, start: int, data: bytes | None) -> None:
        _apply(file.data, start, data)
        file.pending.append((start, data))

    def _name(self, path: str, file: File | None) -> None:
        _set(self.names, path, file)
        self.pending_names.append((os.path.dirname(path), path, file))


def _set(names: dict[str, File], path: str, file: File | None) -> None:
    if file is None:
        names.pop(path, None)
    else:
        names[path] = file


def _apply(data: bytearray, start: int, change: bytes | None) -> None:
    """Writes at `start`, over zeros where nothing was; None cuts there."""
    if len(data) < start:
        data.extend(bytes(start - len(data)))
    if change is None:
        del data[start:]
    else:
        data[start : start + len(change)] = change


def _pieces(change: tuple[int, bytes | None]) -> list[tuple[int, bytes | None]]:
    start, data = change
    if data is None:
        return [change]
    return [(start + at, data[at : at + SECTOR]) for at in range(0, len(data), SECTOR)]
