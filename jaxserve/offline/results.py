"""Results of a batch job in the form of OpenAI's batch output files."""

import time
from typing import Any

from jaxserve.completion import Completion, Sample
from jaxserve.offline.jsonl import LineError, Place
from jaxserve.request import TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer

ID_PREFIX = "batch_req_"  # and the number of the line in the whole input
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write (as in OpenAI's API)


def failure(
    place: Place, custom_id: str | None, error: LineError, status: int = 400
) -> dict[str, Any]:
    """The result of a line that gave none: as a success, but with `error` in place of
    `response`."""
    where: dict[str, Any] = {"line": place.number}
    if place.file:
        where = {"file": place.file, "line": place.line}
    return {
        "id": f"{ID_PREFIX}{place.number}",
        "custom_id": custom_id,
        "response": None,
        "error": {
            "code": error.code,
            "message": f"{place}: {error}",
            **where,
            "status_code": status,
        },
    }


def success(place: Place, custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{ID_PREFIX}{place.number}",
        "custom_id": custom_id,
        "response": {"status_code": 200, "request_id": f"req_{place.number}", "body": body},
        "error": None,
    }


def body(
    completion: Completion,
    tokenizer: Tokenizer,
    *,
    model: str,
    number: int,
    is_chat: bool,
    token_ids: bool,
) -> dict[str, Any]:
    """The body of a response: a chat completion or a text completion, with usage."""
    usage = completion.usage
    result: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice(sample, tokenizer, is_chat, token_ids) for sample in completion.outputs
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }
    if completion.prompt_logprobs is not None:
        entries = completion.prompt_logprobs
        result["prompt_logprobs"] = [None if e is None else _entry(e, tokenizer) for e in entries]
    if token_ids:
        result["prompt_token_ids"] = completion.prompt_token_ids
    return result


def _choice(sample: Sample, tokenizer: Tokenizer, is_chat: bool, token_ids: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": sample.index}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": sample.text}
    else:
        choice["text"] = sample.text
    choice["logprobs"] = None
    if sample.logprobs is not None:
        entries = sample.logprobs
        if is_chat:
            choice["logprobs"] = {"content": [_entry(entry, tokenizer) for entry in entries]}
        else:
            choice["logprobs"] = _columns(entries, tokenizer)
    choice["finish_reason"] = sample.finish_reason
    if token_ids:
        choice["token_ids"] = sample.token_ids
    return choice


def _entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    """One token in the form of chat logprobs."""
    top = [_token(token, logprob, tokenizer) for token, logprob in entry.top]
    return {**_token(entry.token, entry.logprob, tokenizer), "top_logprobs": top}


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.decode([token], skip_special=False)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(tokenizer.piece(token))}


def _columns(entries: tuple[TokenLogprobs, ...], tokenizer: Tokenizer) -> dict[str, Any]:
    """The older form of text completions: one list a property."""

    def text(token: int) -> str:
        return tokenizer.decode([token], skip_special=False)

    return {
        "tokens": [text(entry.token) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {text(token): _finite(logprob) for token, logprob in reversed(entry.top)}
            for entry in entries
        ],
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
