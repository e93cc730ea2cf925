"""What one line of a batch job asks for, checked field by field.

A line is an OpenAI batch object (`custom_id`, `method`, `url`, `body`) or a plain object: one of
`prompt`, `prompt_token_ids`, `messages`, beside `custom_id` and sampling options.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxserve.offline.jsonl import LineError, shorten
from jaxserve.request import SamplingParams

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
MAX_CUSTOM_ID = 512  # characters
_ENDINGS = re.compile(r"([.-](i?q\d\w*|bf16|f16|f32))?(\.gguf)?$")


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options that every form takes; a null is the same as a missing field."""

    model: str | None = None
    user: str | None = None  # for the client's own records
    stream: bool | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    seed: int | None = None


class _Text(_Common, kw_only=True):
    """`/v1/completions`, and plain lines with a prompt."""

    prompt: str | list[int | str] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = None


class _Chat(_Common, kw_only=True):
    """`/v1/chat/completions`, and plain lines with messages."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class _Envelope(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A line that can be tokenised: exactly one of text, token_ids and messages is not None."""

    sampling: SamplingParams
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None  # the name the line asks for
    priority: int = 0
    return_token_ids: bool = False

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def custom_id(value: Mapping[str, Any], number: int) -> str:
    """The id of a line's result; a plain line may leave it out and is then named after its number.

    Raises LineError for an id that is no string, is empty or too long.
    """
    found = value.get("custom_id")
    if found is None and not _is_envelope(value):
        return f"line-{number}"
    if not isinstance(found, str) or not found:
        raise LineError("invalid_request", "custom_id must be a string that is not empty")
    if len(found) > MAX_CUSTOM_ID:
        raise LineError("invalid_request", f"custom_id is longer than {MAX_CUSTOM_ID} characters")
    return found


def parse_task(value: dict[str, Any], defaults: SamplingParams) -> Task:
    """The task of a parsed line; `defaults` hold where it names nothing.

    Raises LineError naming the field that is wrong.
    """
    if _is_envelope(value):
        envelope = _convert(value, _Envelope, "")
        if envelope.method != "POST":
            raise LineError(
                "invalid_request", f"method must be POST, not {shorten(envelope.method)}"
            )
        if envelope.url not in (CHAT_URL, COMPLETION_URL):
            message = (
                f"url {shorten(envelope.url)} is not supported; use {CHAT_URL} or {COMPLETION_URL}"
            )
            raise LineError("unsupported_url", message)
        is_chat, body, where = envelope.url == CHAT_URL, envelope.body, "body."
    else:
        is_chat, where = "messages" in value, ""
        body = {key: entry for key, entry in value.items() if key != "custom_id"}
    if is_chat:
        return _chat_task(_convert(body, _Chat, where), defaults)
    return _text_task(_convert(body, _Text, where), defaults, where)


def short_name(name: str) -> str:
    """What is left of a model's name, hub name or path when folders, the ending of a GGUF file and
    its quantisation are taken away; in lower case."""
    return _ENDINGS.sub("", name.lower().rstrip("/").rpartition("/")[2])


def _is_envelope(value: Mapping[str, Any]) -> bool:
    return "body" in value or "url" in value or "method" in value


def _chat_task(body: _Chat, defaults: SamplingParams) -> Task:
    logprobs = defaults.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise LineError("invalid_request", "top_logprobs needs logprobs to be true")
    if body.logprobs is not None:
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens
    sampling = _sampling(
        body, defaults, logprobs, body.max_tokens if max_tokens is None else max_tokens
    )
    return _task(body, sampling, messages=body.messages)


def _text_task(body: _Text, defaults: SamplingParams, where: str) -> Task:
    logprobs = defaults.logprobs if body.logprobs is None else body.logprobs
    sampling = _sampling(body, defaults, logprobs, body.max_tokens)
    if (body.prompt is None) == (body.prompt_token_ids is None):
        names = f"{where}prompt, {where}prompt_token_ids"
        raise LineError(
            "invalid_request", f"give exactly one of {names}{'' if where else ', messages'}"
        )
    prompt = body.prompt if body.prompt is not None else body.prompt_token_ids or []
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _task(body, sampling, text=prompt)
    if any(isinstance(token, str) for token in prompt):
        message = f"{where}prompt holds several prompts; give each a line of its own"
        raise LineError("invalid_request", message)
    return _task(body, sampling, token_ids=prompt)


def _task(body: _Common, sampling: SamplingParams, **prompt: Any) -> Task:
    if body.stream:
        raise LineError("invalid_request", "stream must be false in a batch job")
    return Task(
        sampling,
        model=body.model,
        priority=body.priority or 0,
        return_token_ids=bool(body.return_token_ids),
        **prompt,
    )


_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "prompt_logprobs",
    "n",
    "seed",
)


def _sampling(
    body: _Common, defaults: SamplingParams, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    given["max_tokens"] = max_tokens
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return dataclasses.replace(defaults, logprobs=logprobs, **given)
    except ValueError as error:
        raise LineError("invalid_request", str(error)) from error


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise LineError("invalid_request", f"logit_bias: {shorten(key)} is not a token id")
    return int(key)


def _convert[T: msgspec.Struct](value: dict[str, Any], kind: type[T], where: str) -> T:
    known = kind.__struct_fields__
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(key[:MAX_CUSTOM_ID], known, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise LineError("unknown_field", f"unknown field {where}{shorten(key)}{hint}")
    try:
        return msgspec.convert(value, type=kind, strict=True)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        message = f"{where}{path.rstrip('`')}: {what}" if path else f"{where}{what}"
        raise LineError("invalid_request", message) from error
