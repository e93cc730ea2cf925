"""The output file of a batch job: one JSON object a line, on disk as soon as it is known."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from jaxserve.offline.job import Outcome
    from jaxserve.offline.jsonl import Place


class InputError(ValueError):
    """A job cannot start: its files or its input are wrong."""


def check_paths(input_path: Path, output_path: Path, *, overwrite: bool) -> None:
    """Raises InputError when the input cannot be read or the output must not be written."""
    if not input_path.exists():
        raise InputError(f"{input_path} does not exist")
    if not input_path.is_file():
        raise InputError(f"{input_path} is no regular file; a job reads its input twice")
    if not os.access(input_path, os.R_OK):
        raise InputError(f"{input_path} cannot be read: permission denied")
    folder = output_path.parent
    if not folder.is_dir():
        raise InputError(f"the folder of --output does not exist: {folder}")
    if output_path.is_dir():
        raise InputError(f"--output {output_path} is a folder; name a file")
    if output_path.exists():
        if os.path.samefile(input_path, output_path):
            raise InputError(f"--output {output_path} is the input file; name another file")
        if not overwrite:
            raise InputError(f"--output {output_path} exists; name another file or add --overwrite")
    if not os.access(output_path if output_path.exists() else folder, os.W_OK):
        raise InputError(f"--output {output_path} cannot be written: permission denied")


class Writer:
    """Writes one result a line and flushes each.  A context manager."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        """Raises InputError when the file exists and is not to be overwritten."""
        try:
            self._file = path.open("wb" if overwrite else "xb")
        except FileExistsError as error:
            raise InputError(f"--output {path} exists by now; it was not touched") from error

    def write(self, place: "Place", outcome: "Outcome", result: bytes) -> None:
        self._file.write(result + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()
