"""JSON objects from outside, parsed strictly."""

import json
import math
from typing import Any, NoReturn

from jaxserve.openai_api.errors import RequestError, shorten


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object that `data` holds; `what` names it in messages ("line", "body").

    Raises RequestError for anything that is not strict JSON (RFC 8259) in UTF-8, a repeated key, a
    number no float can hold, half a surrogate pair, or a value that is no object.
    """
    try:
        text = data.decode("utf-8").rstrip("\r\n")  # so that columns are those of the line
    except UnicodeDecodeError as error:
        raise RequestError("invalid_json", f"not valid UTF-8 at byte {error.start}") from error
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        message = f"invalid JSON: {error.msg} (column {error.colno})"
        raise RequestError("invalid_json", message) from error
    except RecursionError as error:
        raise RequestError("invalid_json", "invalid JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise RequestError("invalid_json", f"the {what} must be a JSON object")
    if "\\u" in text:
        _refuse_surrogates(value)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RequestError("invalid_json", f"the key {shorten(key)} is given twice")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError("invalid_json", f"{name} is not a JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise RequestError("invalid_json", f"the number {shorten(digits)} is too large")
    return value


def _bounded_int(digits: str) -> int:
    if len(digits) > 20:
        raise RequestError("invalid_json", f"the number {shorten(digits)} is too large")
    return int(digits)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_constant=_refuse_constant,
    parse_float=_finite_float,
    parse_int=_bounded_int,
)


def _refuse_surrogates(value: dict[str, Any]) -> None:
    """RequestError naming the first field whose text holds half a surrogate pair."""
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
            raise RequestError("invalid_json", message)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
