"""The status file of a job: what another terminal sees of it.

It lies beside the output, is replaced as a whole about every second, and is no part of the journal:
a job neither reads it nor stops because it cannot be written.
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

SECONDS = 1.0  # between two writes
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


def status_path(output: Path) -> Path:
    return output.with_name(output.name + ".status")


class StatusFile:
    """Writes it.  Also a Progress."""

    def __init__(
        self,
        output: Path,
        lines: int,
        *,
        resumed: int = 0,
        clock: Callable[[], float] = time.time,
        **facts: Any,
    ) -> None:
        """`lines` of this job, of which earlier runs finished `resumed`."""
        self._path = status_path(output)
        self._clock = clock
        now = clock()
        pid = os.getpid()
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

    def update(self, now: Snapshot) -> None:
        moment = self._clock()
        if moment - self._status.updated < SECONDS and moment >= self._status.updated:
            return
        self._take(now, moment)
        self._write()

    def take(self, last: Snapshot) -> None:
        """As `update`, written by `end`."""
        self._take(last, self._clock())

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
        draft = self._path.with_name(f"{self._path.name}.{self._status.pid}")
        try:
            draft.write_bytes(msgspec.json.encode(self._status) + b"\n")
            os.replace(draft, self._path)
        except OSError:  # a full disk is the journal's to report
            draft.unlink(missing_ok=True)


def read(output: Path) -> Status:
    """Raises FileNotFoundError when there was no job, ValueError for a file that is none."""
    try:
        return msgspec.json.decode(status_path(output).read_bytes(), type=Status)
    except msgspec.DecodeError as error:
        raise ValueError(f"{status_path(output)} is no status file: {error}") from error


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
