"""The status file of a job: what another terminal sees of it.

It lies in the journal's folder, is replaced as a whole about every second, and is no part of the
journal: a job neither reads it nor stops because it cannot be written.
"""

import dataclasses
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.offline.progress import Snapshot, eta_seconds, format_seconds
from jaxserve.offline.storage import LocalStorage, Storage, read_all

NAME = "status.json"
SECONDS = 1.0  # between two writes
REMOTE_SECONDS = 10.0  # likewise, where a write is a request to an object store
SILENT_SECONDS = 60.0  # without a write, and a job that should be running is called silent
ENDED = ("done", "parked", "failed")


class Status(msgspec.Struct, kw_only=True):
    """What the file holds."""

    state: str  # running | done | parked | failed
    pid: int
    host: str
    born: int | None  # start time of the process in clock ticks since boot, where it is known
    started: float  # seconds since 1970
    updated: float
    lines: int  # that this job is to run, resumed ones included
    resumed: int = 0  # lines that earlier runs finished
    done: int = 0  # of this run
    failed: int = 0
    tokens: int = 0  # output tokens of this run
    tokens_per_s: float = 0.0
    eta_s: float | None = None
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    facts: dict[str, Any] = {}  # model, shard and what else names the job


class StatusFile:
    """Writes it.  Also a Progress."""

    def __init__(
        self,
        storage: Storage,
        folder: str,
        lines: int,
        resumed: int = 0,
        *,
        clock: Callable[[], float] = time.time,
        **facts: Any,
    ) -> None:
        """`folder` is the journal's; `lines` of this job, of which earlier runs finished
        `resumed`."""
        self._storage = storage
        self._path = f"{folder}/{NAME}"
        self._clock = clock
        self._seconds = SECONDS if storage.appends else REMOTE_SECONDS
        now, pid = clock(), os.getpid()
        self._status = Status(
            state="running",
            pid=pid,
            host=platform.node(),
            born=born(pid),
            started=now,
            updated=now,
            lines=lines,
            resumed=resumed,
            facts=facts,
        )
        self._write()

    def update(self, now: Snapshot, *, last: bool = False) -> None:
        """`last`: not written before `end` is called."""
        moment = self._clock()
        early = 0 <= moment - self._status.updated < self._seconds
        if last or not early:
            self._take(now, moment)
        if not last and not early:
            self._write()

    def end(self, state: str) -> None:
        """How it ended: one of ENDED."""
        self._status.state, self._status.eta_s = state, None
        self._write()

    def close(self) -> None:
        """`end` has the last word."""

    def _take(self, now: Snapshot, moment: float) -> None:
        status = self._status
        elapsed = max(1e-9, moment - status.started)
        for field in dataclasses.fields(now):
            setattr(status, field.name, getattr(now, field.name))
        status.tokens_per_s = now.tokens / elapsed
        status.eta_s = eta_seconds(now, status.lines - status.resumed, elapsed)

    def _write(self) -> None:
        self._status.updated = self._clock()
        data = msgspec.json.encode(self._status) + b"\n"
        try:
            if isinstance(self._storage, LocalStorage):
                _replace(Path(self._path), data)
            else:
                self._storage.put(self._path, data)
        except OSError:  # a full disk is the journal's to report
            pass


def read(storage: Storage, folder: str) -> Status:
    """Raises OSError when there was no job, ValueError for a file that is none."""
    path = f"{folder}/{NAME}"
    try:
        return msgspec.json.decode(read_all(storage, path), type=Status)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no status file: {error}") from error


def _replace(path: Path, data: bytes) -> None:
    """At once, but not synced: nothing is lost with a status, and the engine would wait."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(data)
    os.replace(draft, path)


def judge(status: Status, now: float) -> str:
    """The state as it is: a job that should be running may be "dead" (its process is gone) or
    "silent" (there, or on another machine, but nothing was heard for SILENT_SECONDS)."""
    if status.state in ENDED:
        return status.state
    if status.host == platform.node() and not _lives(status):
        return "dead"
    return "silent" if now - status.updated > SILENT_SECONDS else status.state


def born(pid: int) -> int | None:
    """When a process began, so that a pid that is used again is not mistaken; None where the
    system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])  # a zombie lives no more


def describe(status: Status, state: str, now: float) -> str:
    """One line for people."""
    ended = status.resumed + status.done + status.failed
    share = f" ({ended / status.lines:.0%})" if status.lines else ""
    parts = [
        f"{state}: {ended} of {status.lines} lines{share}, {status.failed} failed in this run",
        f"{status.tokens_per_s:,.0f} tok/s",
    ]
    if state == "running":
        eta = "?" if status.eta_s is None else format_seconds(status.eta_s)
        parts += [f"ETA {eta}", f"KV {status.kv_used:.0%}"]
    if state == "dead":
        parts.append(f"process {status.pid} is gone; the same command resumes it")
    if state == "parked":
        parts.append("the same command resumes it")
    parts.append(f"last heard of {format_seconds(max(0.0, now - status.updated))} ago")
    return "; ".join(parts)


def _lives(status: Status) -> bool:
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return status.born is None or born(status.pid) == status.born
