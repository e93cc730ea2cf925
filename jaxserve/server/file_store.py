"""Files that clients upload and that batches write, in a folder that outlives the server."""

import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import IO

import msgspec

from jaxserve.offline.storage import LocalStorage

ID = re.compile(r"file-[0-9a-f]{24}")
MAX_NAME = 255  # characters of a file's name
_RECORD, _CONTENT = "file.json", "content"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's file object."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str  # batch | batch_output
    object: str = "file"
    status: str = "processed"


class FileStore:
    """One folder a file.  A file is there once its record is: what a crash left half done is not
    seen, and is removed at the next start."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder
        self._storage = LocalStorage()
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, FileRecord] = {}
        for place in folder.iterdir():
            if not ID.fullmatch(place.name):
                continue
            try:
                data = (place / _RECORD).read_bytes()
                self._files[place.name] = msgspec.json.decode(data, type=FileRecord)
            except (OSError, msgspec.DecodeError):
                shutil.rmtree(place, ignore_errors=True)

    def create(self, content: IO[bytes], filename: str, purpose: str) -> FileRecord:
        """Copies `content`, syncs it, and then makes it visible.  Raises OSError; nothing is left
        behind then."""
        name = f"file-{secrets.token_hex(12)}"
        place = self._folder / name
        try:
            place.mkdir()
            with (place / _CONTENT).open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
                size = file.tell()
                file.flush()
                os.fsync(file.fileno())
            record = FileRecord(
                id=name,
                bytes=size,
                created_at=int(time.time()),
                filename=filename[:MAX_NAME],
                purpose=purpose,
            )
            self._storage.put(str(place / _RECORD), msgspec.json.encode(record))
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self._files[name] = record
        return record

    def get(self, name: str) -> FileRecord | None:
        return self._files.get(name)

    def path(self, record: FileRecord) -> Path:
        """Of its content."""
        return self._folder / record.id / _CONTENT

    def list(self) -> list[FileRecord]:
        """The newest first."""
        return sorted(self._files.values(), key=lambda file: (-file.created_at, file.id))

    def delete(self, record: FileRecord) -> None:
        self._files.pop(record.id, None)
        shutil.rmtree(self._folder / record.id, ignore_errors=True)
