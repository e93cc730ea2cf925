"""Several outputs of one input, checked and put together in the order of the input.

A result is known by its id, `batch_req_N` for line N of the whole input, and must carry that line's
custom_id: so outputs of another input, or of an input that was changed, are found out.
"""

import contextlib
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from jaxserve.offline import tasks
from jaxserve.offline.codecs import Plain, codec_of
from jaxserve.offline.errors import InputError
from jaxserve.offline.inputs import InputFile, open_input
from jaxserve.offline.jsonl import Line, parse_object
from jaxserve.offline.results import ID_PREFIX
from jaxserve.offline.storage import LocalStorage, Os, sync_folder
from jaxserve.openai_api.errors import RequestError

type Ints = np.ndarray[Any, np.dtype[np.int64]]


class Named(NamedTuple):
    """A line of the input, as messages name it."""

    number: int
    custom_id: str | None

    def __str__(self) -> str:
        return f"{self.number}" if self.custom_id is None else f"{self.number} ({self.custom_id})"


class Report(NamedTuple):
    """What the outputs hold of the input.  Lines that are `missing`, `doubled` or `foreign` (a
    result that belongs to no line of the input, by its id) keep the merge from being written."""

    lines: int
    done: int
    failed: list[Named]
    missing: list[Named]
    doubled: list[Named]
    foreign: list[str]  # file and line

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.doubled or self.foreign)


class _Head(msgspec.Struct):
    id: str
    custom_id: str | None = None
    error: Any = None


class _Index(NamedTuple):
    """Where the results lie; one entry a result, by line number."""

    numbers: Ints
    files: Ints
    starts: Ints
    sizes: Ints
    failed: Ints
    foreign: list[str]


def merge(lines: Iterable[Line], outputs: Sequence[InputFile], target: Path) -> Report:
    """Writes `target` when the outputs hold every line of the input exactly once; otherwise it is
    left as it was.

    A last line of an output that is torn counts as not there.  About 100 bytes of memory a line,
    and more for each that the report names; compressed or remote outputs are unpacked beside the
    target for as long as it takes.  Raises InputError for a target whose name asks for compression.
    """
    if not isinstance(codec_of(str(target)), Plain):
        raise InputError(f"{target}: the merged output is not compressed; name it without a suffix")
    draft = target.with_name(f"{target.name}.{os.getpid()}.merging")
    with contextlib.ExitStack() as stack:
        stack.callback(draft.unlink, missing_ok=True)
        files = [stack.enter_context(_open(output, target.parent)) for output in outputs]
        names = [output.name for output in outputs]
        index = _read_outputs(files, names)
        with draft.open("xb") as out:
            report = _write(lines, index, files, names, out)
            out.flush()
            os.fsync(out.fileno())
        if report.is_complete:
            os.replace(draft, target)
            sync_folder(Os(), str(target.parent))
    return report


def _open(output: InputFile, folder: Path) -> BinaryIO:
    """For reading anywhere."""
    if isinstance(output.storage, LocalStorage) and isinstance(codec_of(output.path), Plain):
        return open(output.path, "rb")
    spool = tempfile.TemporaryFile(dir=folder)
    try:
        with open_input(output) as stream:
            shutil.copyfileobj(stream, spool, 1 << 20)
        spool.seek(0)
    except BaseException:
        spool.close()
        raise
    return cast(BinaryIO, spool)


def _read_outputs(files: Sequence[BinaryIO], names: Sequence[str]) -> _Index:
    columns = [array("q") for _ in range(5)]
    foreign: list[str] = []
    for place, file in enumerate(files):
        for row, (start, data) in enumerate(_whole_lines(file), 1):
            head = _head(data)
            number = None if head is None else _number(head.id)
            if head is None or number is None:
                foreign.append(f"{names[place]}, line {row}")
                continue
            values = (number, place, start, len(data), head.error is not None)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
    found = [np.frombuffer(column, np.int64) for column in columns]
    order = np.argsort(found[0], kind="stable")
    numbers, places, starts, sizes, failed = (column[order] for column in found)
    return _Index(numbers, places, starts, sizes, failed, foreign)


def _whole_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Offset and content of each line that has its end."""
    start = 0
    for data in file:
        if data.endswith(b"\n") and data.strip():
            yield start, data
        start += len(data)


def _head(data: bytes) -> _Head | None:
    try:
        return msgspec.json.decode(data, type=_Head)
    except msgspec.DecodeError:
        return None


def _number(name: str) -> int | None:
    digits = name.removeprefix(ID_PREFIX)
    return int(digits) if digits != name and digits.isdecimal() and len(digits) < 19 else None


def _write(
    lines: Iterable[Line],
    index: _Index,
    files: Sequence[BinaryIO],
    names: Sequence[str],
    out: BinaryIO,
) -> Report:
    """Goes through input and results side by side; both are in the order of line numbers."""
    report = Report(0, 0, [], [], [], list(index.foreign))
    at, count, done = 0, 0, 0

    def where(row: int) -> str:
        return f"{names[index.files[row]]}, result of line {index.numbers[row]}"

    def fetch(row: int) -> bytes:
        file = files[index.files[row]]
        file.seek(int(index.starts[row]))
        return file.read(int(index.sizes[row]))

    for line in lines:
        count += 1
        while at < len(index.numbers) and index.numbers[at] < line.number:
            report.foreign.append(where(at))
            at += 1
        end = at
        while end < len(index.numbers) and index.numbers[end] == line.number:
            end += 1
        named = Named(line.number, _custom_id(line))
        found = [fetch(row) for row in range(at, end)]
        if not found:
            report.missing.append(named)
        elif len(found) > 1:
            report.doubled.append(named)
        elif not _belongs(found[0], named):
            report.foreign.append(where(at))
        else:
            out.write(found[0])
            if index.failed[at]:
                report.failed.append(named)
            else:
                done += 1
        at = end
    report.foreign.extend(where(row) for row in range(at, len(index.numbers)))
    return report._replace(lines=count, done=done)


def _custom_id(line: Line) -> str | None:
    try:
        return tasks.custom_id(parse_object(line), line.number)
    except RequestError:
        return None


def _belongs(data: bytes, line: Named) -> bool:
    head = _head(data)
    return head is not None and head.custom_id == line.custom_id
