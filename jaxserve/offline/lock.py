"""One process works on an output.  The lock is the operating system's, so it ends with the process
that holds it, however that ends; an object store has a lease that must be renewed."""

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

import filelock

from jaxserve.offline.errors import InputError
from jaxserve.offline.storage import Storage, read_all

_LOCK, _OWNER, _LEASE = "lock", "owner.json", "lease.json"
LEASE_SECONDS = 60.0  # without a renewal a lease is nobody's


class Lock(Protocol):
    """Held from its making on."""

    def sign(self) -> None:
        """Called once, when the job may write."""
        ...

    def renew(self) -> None:
        """Called now and then while the job runs."""
        ...

    def release(self) -> None:
        """Idempotent."""
        ...


class LocalLock:
    """A lock on a file in the journal's folder, which must be there."""

    def __init__(self, folder: str) -> None:
        """Raises InputError, naming the other process, when the lock is taken."""
        self._owner = os.path.join(folder, _OWNER)
        # Whoever releases it may be another thread of the process.
        self._lock = filelock.FileLock(os.path.join(folder, _LOCK), thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise InputError(
                f"another process{_described(_read(self._owner))} works on {_output_of(folder)}; "
                f"wait for it or end it"
            ) from error
        except (OSError, NotImplementedError) as error:
            raise InputError(f"{folder} cannot be locked: {error}") from error

    def sign(self) -> None:
        """Says who holds the lock, for those who find it taken."""
        with open(self._owner, "w", encoding="utf-8") as file:
            json.dump(_me(), file)

    def renew(self) -> None:
        """Nothing to do: the lock is held as long as the process lives."""

    def release(self) -> None:
        self._lock.release()


class Lease:
    """For storage without locks: an object that says until when it is somebody's.

    Two processes that start within one moment may both get it; what they write twice, `merge`
    finds.
    """

    def __init__(
        self, storage: Storage, folder: str, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises InputError when another process renewed the lease lately."""
        self._storage = storage
        self._path = f"{folder}/{_LEASE}"
        self._clock = clock
        self._until = 0.0
        self._me = _me()
        found = self._found()
        if found and found.get("until", 0.0) > clock() and found.get("owner") != self._me:
            left = found["until"] - clock()
            raise InputError(
                f"another process{_described(found['owner'])} works on {_output_of(folder)}; if it "
                f"is gone, its lease ends in {left:.0f} s"
            )

    def sign(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Raises OSError when another process took over."""
        now = self._clock()
        if self._until - now > LEASE_SECONDS / 2:
            return
        found = self._found()
        if self._until and found and found.get("owner") != self._me:
            raise OSError(f"another process{_described(found['owner'])} took over this output")
        self._until = now + LEASE_SECONDS
        content = {"owner": self._me, "until": self._until}
        self._storage.put(self._path, json.dumps(content).encode())

    def release(self) -> None:
        if self._until:
            self._until = 0.0
            self._storage.remove(self._path)

    def _found(self) -> dict[str, Any] | None:
        if self._storage.size(self._path) is None:
            return None
        try:
            return json.loads(read_all(self._storage, self._path))
        except ValueError:
            return None


def take(storage: Storage, folder: str) -> Lock:
    """The lock of a journal's folder.  Raises InputError when another process has it."""
    return LocalLock(folder) if storage.appends else Lease(storage, folder)


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _described(owner: dict[str, Any] | None) -> str:
    return f" (pid {owner.get('pid')} on {owner.get('host')})" if owner else ""


def _output_of(folder: str) -> str:
    return folder.removesuffix(".journal")
