"""Lines of a JSONL file, read with bounded memory and parsed strictly."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

MAX_LINE_BYTES = 16 * 1024 * 1024
_SHOWN = 80  # characters of foreign text in a message


class LineError(ValueError):
    """One line cannot be run.  `code` is stable and machine-readable; the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


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
    """The JSON object on a line.

    Raises LineError for anything that is not strict JSON (RFC 8259) in UTF-8, a repeated key, a
    number no float can hold, half a surrogate pair, or a value that is no object.
    """
    if line.data is None:
        raise LineError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        text = line.data.decode("utf-8").rstrip("\r\n")  # so that columns are those of the line
    except UnicodeDecodeError as error:
        raise LineError("invalid_json", f"not valid UTF-8 at byte {error.start}") from error
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except json.JSONDecodeError as error:
        message = f"invalid JSON: {error.msg} (column {error.colno})"
        raise LineError("invalid_json", message) from error
    except RecursionError as error:
        raise LineError("invalid_json", "invalid JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise LineError("invalid_json", "the line must be a JSON object")
    if "\\u" in text:
        _refuse_surrogates(value)
    return value


def shorten(text: str) -> str:
    """Foreign text as a message shows it: escaped, and not longer than a line."""
    return ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise LineError("invalid_json", f"the key {shorten(key)} is given twice")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise LineError("invalid_json", f"{name} is not a JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise LineError("invalid_json", f"the number {shorten(digits)} is too large")
    return value


def _bounded_int(digits: str) -> int:
    if len(digits) > 20:
        raise LineError("invalid_json", f"the number {shorten(digits)} is too large")
    return int(digits)


def _refuse_surrogates(value: dict[str, Any]) -> None:
    """LineError naming the first field whose text holds half a surrogate pair."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, dict):
            for key, entry in item.items():
                waiting.append((where, key))
                waiting.append((f"{where}.{key}" if where else key, entry))
        elif isinstance(item, list):
            waiting.extend((f"{where}[{index}]", entry) for index, entry in enumerate(item))
        elif isinstance(item, str) and not _is_unicode(item):
            message = f"{ascii(where)[1:-1] or 'a key'} holds half a surrogate pair, no valid text"
            raise LineError("invalid_json", message)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
