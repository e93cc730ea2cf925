"""Lines of a JSONL file, read with bounded memory and parsed strictly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxserve.openai_api import strict_json
from jaxserve.openai_api.errors import RequestError

MAX_LINE_BYTES = 16 * 1024 * 1024


class Place(NamedTuple):
    """Where a line stands.  `index` and `number` count through all inputs of a job."""

    number: int  # from 1, blank lines counted too
    index: int = 0  # from 0, among the lines that are not blank
    file: str = ""  # empty when a job has one input
    line: int = 0  # within `file`

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" if self.file else f"line {self.number}"


class Line(NamedTuple):
    """`data` is None when the line is longer than MAX_LINE_BYTES."""

    place: Place
    data: bytes | None

    @property
    def number(self) -> int:
        return self.place.number


def read_lines(path: Path) -> Iterator[Line]:
    """Every line that is not blank; a byte order mark at the start of the file is skipped."""
    with path.open("rb") as file:
        for index, (number, data) in enumerate(raw_lines(file)):
            yield Line(Place(number, index), data)


def raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Number and bytes of every line that is not blank; None for one longer than
    MAX_LINE_BYTES."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        complete = len(data) <= MAX_LINE_BYTES or data.endswith(b"\n")
        if not complete:
            while data and not data.endswith(b"\n"):
                data = file.readline(MAX_LINE_BYTES)
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")
        if not complete:
            yield number, None
        elif data and not data.isspace():
            yield number, data


def parse_object(line: Line) -> dict[str, Any]:
    """The JSON object on a line.  Raises RequestError (`strict_json.parse_object`)."""
    if line.data is None:
        raise RequestError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    return strict_json.parse_object(line.data, "line")
