"""The results of a batch, as files that clients download."""

import tempfile
from pathlib import Path
from typing import IO, Any

import msgspec

from jaxserve.server.batches import BatchRecord, Counts
from jaxserve.server.file_store import FileStore


class _Result(msgspec.Struct):
    error: Any = None


def keep(files: FileStore, batch: BatchRecord, results: Path) -> None:
    """Makes a file of the lines that succeeded and one of those that did not, and counts them.
    Raises OSError."""
    with tempfile.TemporaryFile() as good, tempfile.TemporaryFile() as bad:
        done, failed = _split(results, good, bad)
        if done and batch.output_file_id is None:
            batch.output_file_id = _create(files, good, f"{batch.id}_output.jsonl")
        if failed and batch.error_file_id is None:
            batch.error_file_id = _create(files, bad, f"{batch.id}_error.jsonl")
    total = max(batch.request_counts.total, done + failed)
    batch.request_counts = Counts(total, done, failed)


def _create(files: FileStore, content: IO[bytes], name: str) -> str:
    content.seek(0)
    return files.create(content, name, "batch_output").id


def _split(results: Path, good: IO[bytes], bad: IO[bytes]) -> tuple[int, int]:
    """How many lines of `results` went to each."""
    done = failed = 0
    if results.exists():
        with results.open("rb") as file:
            for line in file:
                if msgspec.json.decode(line, type=_Result).error is None:
                    good.write(line)
                    done += 1
                else:
                    bad.write(line)
                    failed += 1
    return done, failed
