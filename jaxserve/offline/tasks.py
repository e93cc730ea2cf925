"""What one line of a batch job asks for.

A line is an OpenAI batch object (`custom_id`, `method`, `url`, `body`) or a plain object: one of
`prompt`, `prompt_token_ids`, `messages`, beside `custom_id` and sampling options.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from jaxserve.openai_api.bodies import Task, convert, parse_chat, parse_text
from jaxserve.openai_api.errors import RequestError, shorten
from jaxserve.request import SamplingParams

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
MAX_CUSTOM_ID = 512  # characters
_LENIENT = json.JSONDecoder()  # takes NaN, repeated keys, half surrogate pairs
_BLANK = re.compile(r"[ \t\r\n]*")


class _Envelope(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def custom_id(value: Mapping[str, Any], number: int) -> str:
    """The id of a line's result; a plain line may leave it out and is then named after its number.

    Raises RequestError for an id that is no string, is empty or too long.
    """
    found = value.get("custom_id")
    if found is None and not _is_envelope(value):
        return f"line-{number}"
    if not isinstance(found, str) or not found:
        raise RequestError("invalid_request", "custom_id must be a string that is not empty")
    if len(found) > MAX_CUSTOM_ID:
        message = f"custom_id is longer than {MAX_CUSTOM_ID} characters"
        raise RequestError("invalid_request", message)
    return found


def salvaged_id(data: bytes | None) -> str | None:
    """The custom_id of a line that is no strict JSON, where it can be told all the same: given
    once, and before what breaks the line."""
    given = [value for key, value in _entries(data or b"") if key == "custom_id"]
    try:
        name = custom_id({"custom_id": given[0]}, 0) if len(given) == 1 and given[0] else None
        return name if name is None or name.encode() else None
    except (RequestError, UnicodeEncodeError):
        return None


def parse_task(value: dict[str, Any], defaults: SamplingParams) -> Task:
    """The task of a parsed line; `defaults` hold where it names nothing.

    Raises RequestError naming the field that is wrong.
    """
    if _is_envelope(value):
        envelope = convert(value, _Envelope, "")
        if envelope.method != "POST":
            message = f"method must be POST, not {shorten(envelope.method)}"
            raise RequestError("invalid_request", message)
        if envelope.url not in (CHAT_URL, COMPLETION_URL):
            message = (
                f"url {shorten(envelope.url)} is not supported; use {CHAT_URL} or {COMPLETION_URL}"
            )
            raise RequestError("unsupported_url", message)
        is_chat, body, where = envelope.url == CHAT_URL, envelope.body, "body."
    else:
        is_chat, where = "messages" in value, ""
        body = {key: entry for key, entry in value.items() if key != "custom_id"}
    call = parse_chat(body, defaults, where) if is_chat else parse_text(body, defaults, where)
    if call.stream:
        raise RequestError("invalid_request", "stream must be false in a batch job")
    if len(call.tasks) > 1:
        message = f"{where}prompt holds several prompts; give each a line of its own"
        raise RequestError("invalid_request", message)
    return call.tasks[0]


def _entries(data: bytes) -> Iterator[tuple[str, Any]]:
    """Key and value of what a line that is an object begins with, as far as it can be read."""
    text = data.decode("utf-8", "surrogateescape")

    def after_blank(place: int, mark: str = "") -> int:
        blank = _BLANK.match(text, place)
        assert blank is not None
        if not text.startswith(mark, blank.end()):
            raise ValueError
        return blank.end() + len(mark)

    try:
        place = after_blank(after_blank(0, "{"))
        while True:
            key, place = _LENIENT.raw_decode(text, place)
            value, place = _LENIENT.raw_decode(text, after_blank(after_blank(place, ":")))
            yield key, value
            place = after_blank(after_blank(place, ","))
    except (ValueError, RecursionError):
        return


def _is_envelope(value: Mapping[str, Any]) -> bool:
    return "body" in value or "url" in value or "method" in value
