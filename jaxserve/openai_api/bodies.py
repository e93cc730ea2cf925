"""What the body of a request asks for, checked field by field.

One parser for HTTP and for the lines of a batch job.  A field that is unknown is refused, as
OpenAI's servers do; so is a field of OpenAI's that asks for what this engine cannot do.  Fields
that only label a request are taken and change nothing.
"""

import dataclasses
import difflib
import functools
import re
from typing import Any, NamedTuple

import msgspec

from jaxserve.openai_api.errors import RequestError, shorten
from jaxserve.request import SamplingParams

MAX_PROMPTS = 128  # of one body
MAX_CHOICES = 128  # prompts times n of one body
_ENDINGS = re.compile(r"([.-](i?q\d\w*|bf16|f16|f32))?(\.gguf)?$")
# Fields of OpenAI's that are not supported, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # of OpenAI's; events are never padded here


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options that every form takes; a null is the same as a missing field."""

    model: str | None = None
    # For the client's own records, and for services that OpenAI has around its models.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    slo_class: str | None = None
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

    prompt: str | list[int | str | list[int]] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = None


class _Chat(_Common, kw_only=True):
    """`/v1/chat/completions`, and plain lines with messages."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


BODIES = (_Chat, _Text)  # for a description of them


class Task(NamedTuple):
    """A prompt that can be tokenised: exactly one of text, token_ids and messages is not None."""

    sampling: SamplingParams
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None  # the name that was asked for
    priority: int = 0
    salt: str = ""
    return_token_ids: bool = False

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


class Call(NamedTuple):
    """A whole body: one task a prompt, which differ in the prompt only."""

    tasks: list[Task]
    stream: bool = False
    include_usage: bool = False  # the stream ends with the usage


def parse_chat(body: dict[str, Any], defaults: SamplingParams, where: str = "") -> Call:
    """The body of a chat; `defaults` hold where it names nothing, `where` opens the names of fields
    in messages.  Raises RequestError naming the field that is wrong."""
    chat = convert(body, _Chat, where)
    logprobs = defaults.logprobs
    if chat.top_logprobs is not None and not chat.logprobs:
        message = "top_logprobs needs logprobs to be true"
        raise RequestError("invalid_request", message, "top_logprobs")
    if chat.logprobs is not None:
        logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    max_tokens = chat.max_completion_tokens
    sampling = _sampling(
        chat, defaults, logprobs, chat.max_tokens if max_tokens is None else max_tokens
    )
    return _call(chat, sampling, [{"messages": chat.messages}])


def parse_text(body: dict[str, Any], defaults: SamplingParams, where: str = "") -> Call:
    """Like `parse_chat`, for the body of a text completion."""
    text = convert(body, _Text, where)
    logprobs = defaults.logprobs if text.logprobs is None else text.logprobs
    sampling = _sampling(text, defaults, logprobs, text.max_tokens)
    if (text.prompt is None) == (text.prompt_token_ids is None):
        names = f"{where}prompt, {where}prompt_token_ids"
        message = f"give exactly one of {names}{'' if where else ', messages'}"
        raise RequestError("invalid_request", message, f"{where}prompt")
    if text.prompt is None:
        prompts: list[dict[str, Any]] = [{"token_ids": text.prompt_token_ids}]
    else:
        prompts = _prompts(text.prompt, f"{where}prompt")
    return _call(text, sampling, prompts)


def short_name(name: str) -> str:
    """What is left of a model's name, hub name or path when folders, the ending of a GGUF file and
    its quantisation are taken away; in lower case."""
    return _ENDINGS.sub("", name.lower().rstrip("/").rpartition("/")[2])


def convert[T: msgspec.Struct](value: dict[str, Any], kind: type[T], where: str) -> T:
    """`value` as a struct; RequestError names the field that is unknown or has a wrong type."""
    known = _field_names(kind)
    taken: dict[str, Any] = {}
    for key, entry in value.items():
        if key in known:
            taken[key] = entry
        elif issubclass(kind, _Common) and key in NEUTRAL:
            if entry is not None and entry not in NEUTRAL[key]:
                message = f"{where}{key} is not supported with this value; leave it out"
                raise RequestError("unsupported_field", message, f"{where}{key}")
        else:
            close = difflib.get_close_matches(key[:80], kind.__struct_fields__, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close else ""
            message = f"unknown field {where}{shorten(key)}{hint}"
            raise RequestError("unknown_field", message, f"{where}{shorten(key)[1:-1]}")
    try:
        return msgspec.convert(taken, type=kind, strict=True)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        message = f"{where}{path}: {what}" if path else f"{where}{what}"
        raise RequestError("invalid_request", message, f"{where}{path}" or None) from error


@functools.cache
def _field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def _call(body: _Common, sampling: SamplingParams, prompts: list[dict[str, Any]]) -> Call:
    if body.stream_options is not None and not body.stream:
        message = "stream_options needs stream to be true"
        raise RequestError("invalid_request", message, "stream_options")
    if len(prompts) > 1 and (sampling.prompt_logprobs is not None or body.return_token_ids):
        message = "prompt_logprobs and return_token_ids need a request with one prompt"
        raise RequestError("invalid_request", message, "prompt")
    if len(prompts) * sampling.n > MAX_CHOICES:
        message = f"{len(prompts)} prompts times n={sampling.n} is more than {MAX_CHOICES} choices"
        raise RequestError("invalid_request", message, "n")
    tasks = [
        Task(
            sampling,
            model=body.model,
            priority=body.priority or 0,
            salt=body.cache_salt or "",
            return_token_ids=bool(body.return_token_ids),
            **prompt,
        )
        for prompt in prompts
    ]
    options = body.stream_options or _StreamOptions()
    return Call(tasks, bool(body.stream), bool(options.include_usage))


def _prompts(prompt: str | list[int | str | list[int]], where: str) -> list[dict[str, Any]]:
    """One entry a prompt: text, or token ids; a flat list of ids is one prompt."""
    if isinstance(prompt, str):
        return [{"text": prompt}]
    if all(type(item) is int for item in prompt):
        return [{"token_ids": prompt}]
    if len(prompt) > MAX_PROMPTS:
        message = f"{where} holds {len(prompt)} prompts; at most {MAX_PROMPTS} may be in a request"
        raise RequestError("invalid_request", message, where)
    if all(isinstance(item, str) for item in prompt):
        return [{"text": item} for item in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [{"token_ids": item} for item in prompt]
    message = f"{where} must be a text, a list of texts, token ids, or a list of lists of token ids"
    raise RequestError("invalid_request", message, where)


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
    "slo_class",
)


def _sampling(
    body: _Common, defaults: SamplingParams, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    given: list[tuple[str, Any]] = [
        (name, value) for name in _SAME_NAME if (value := getattr(body, name)) is not None
    ]
    if max_tokens is not None:
        given.append(("max_tokens", max_tokens))
    if body.stop is not None:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        given.append(("stop", stop))
    if body.stop_token_ids is not None:
        given.append(("stop_token_ids", tuple(body.stop_token_ids)))
    bias = body.logit_bias
    entries = None if bias is None else tuple((_token_id(key), bias[key]) for key in bias)
    try:
        return _replaced(defaults, logprobs, tuple(given), entries)
    except ValueError as error:
        named = re.match(r"\w+", str(error))
        param = named[0] if named and named[0] in _Chat.__struct_fields__ else None
        raise RequestError("invalid_request", str(error), param) from error


@functools.lru_cache(maxsize=64)
def _replaced(
    defaults: SamplingParams,
    logprobs: int | None,
    given: tuple[tuple[str, Any], ...],
    bias: tuple[tuple[int, float], ...] | None,
) -> SamplingParams:
    """Most lines of a job, and most requests of a client, ask for the same options: they are
    checked once.  No two values of one option that are equal differ in type."""
    options = dict(given) if bias is None else dict(given, logit_bias=dict(bias))
    return dataclasses.replace(defaults, logprobs=logprobs, **options)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        message = f"logit_bias: {shorten(key)} is not a token id"
        raise RequestError("invalid_request", message, "logit_bias")
    return int(key)
