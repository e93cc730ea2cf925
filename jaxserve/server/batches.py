"""Batches: uploaded files run by the offline runner, in a folder that outlives the server."""

import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxserve.offline.storage import LocalStorage

ID = re.compile(r"batch_[0-9a-f]{24}")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
WINDOW_SECONDS = 24 * 3600
ENDED = ("completed", "failed", "cancelled")
_RECORD = "batch.json"

type Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"
]


class Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """OpenAI's batch object."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    object: str = "batch"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class BatchStore:
    """One folder a batch: its record, the results and their journal."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder
        self._storage = LocalStorage()
        folder.mkdir(parents=True, exist_ok=True)
        self._batches: dict[str, BatchRecord] = {}
        for place in folder.iterdir():
            if ID.fullmatch(place.name) and (place / _RECORD).exists():
                data = (place / _RECORD).read_bytes()
                self._batches[place.name] = msgspec.json.decode(data, type=BatchRecord)

    def create(
        self, input_file: str, endpoint: str, window: str, metadata: dict[str, str] | None
    ) -> BatchRecord:
        """Raises OSError; nothing is left behind then."""
        now = int(time.time())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=endpoint,
            input_file_id=input_file,
            completion_window=window,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=metadata,
        )
        try:
            self.place(record).mkdir()
            self.save(record)
        except BaseException:
            shutil.rmtree(self.place(record), ignore_errors=True)
            raise
        self._batches[record.id] = record
        return record

    def place(self, record: BatchRecord) -> Path:
        """Its folder."""
        return self._folder / record.id

    def save(self, record: BatchRecord) -> None:
        """Durable when this returns.  Raises OSError."""
        self._storage.put(str(self.place(record) / _RECORD), msgspec.json.encode(record))

    def move(self, record: BatchRecord, status: Status) -> None:
        """A new status, with its time.  Raises OSError."""
        record.status = status
        setattr(record, f"{status}_at", int(time.time()))
        self.save(record)

    def get(self, name: str) -> BatchRecord | None:
        return self._batches.get(name)

    def list(self) -> list[BatchRecord]:
        """The newest first."""
        return sorted(self._batches.values(), key=lambda batch: (-batch.created_at, batch.id))

    def next(self) -> BatchRecord | None:
        """The oldest one that has not ended."""
        waiting = [batch for batch in self._batches.values() if not batch.ended]
        return min(waiting, key=lambda batch: (batch.created_at, batch.id), default=None)
