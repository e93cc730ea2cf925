"""Answers in the form of OpenAI's API."""

import time
from collections.abc import Sequence
from typing import Any

from jaxserve.completion import Chunk, Completion, Sample, Usage
from jaxserve.request import TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write (as in OpenAI's API)


def body(
    completions: Sequence[Completion],
    tokenizer: Tokenizer,
    *,
    model: str,
    name: str,
    is_chat: bool,
    token_ids: bool,
) -> dict[str, Any]:
    """The body of a response: a chat completion or a text completion, with usage.

    `name` is what its id ends with; `token_ids` puts those of prompt and answers in.  The n choices
    of the second prompt follow those of the first.
    """
    first = completions[0]
    choices = [sample for completion in completions for sample in completion.outputs]
    result: dict[str, Any] = {
        **head(model=model, name=name, is_chat=is_chat, streamed=False),
        "choices": [
            _choice(sample, index, tokenizer, is_chat=is_chat, token_ids=token_ids)
            for index, sample in enumerate(choices)
        ],
        "usage": usage([completion.usage for completion in completions]),
    }
    if first.prompt_logprobs is not None:
        result["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs, tokenizer)
    if token_ids:
        result["prompt_token_ids"] = first.prompt_token_ids
    return result


def head(*, model: str, name: str, is_chat: bool, streamed: bool) -> dict[str, Any]:
    """What every body and every event of a stream begins with."""
    kind = ("chat.completion" if is_chat else "text_completion") + (
        ".chunk" if is_chat and streamed else ""
    )
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Tokens of all prompts of one request together."""
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
        "total_tokens": sum(usage.total_tokens for usage in usages),
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    return [None if entry is None else _entry(entry, tokenizer) for entry in entries]


def chunk_choice(
    chunk: Chunk, index: int, tokenizer: Tokenizer, *, is_chat: bool, token_ids: bool
) -> dict[str, Any]:
    """What a chunk adds to choice `index`, for an event of a stream."""
    choice: dict[str, Any] = {"index": index}
    if is_chat:
        choice["delta"] = {"content": chunk.text} if chunk.text else {}
    else:
        choice["text"] = chunk.text
    choice["logprobs"] = _logprobs(chunk.logprobs, tokenizer, is_chat)
    choice["finish_reason"] = chunk.finish_reason
    if token_ids:
        choice["token_ids"] = chunk.token_ids
    return choice


def _choice(
    sample: Sample, index: int, tokenizer: Tokenizer, *, is_chat: bool, token_ids: bool
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": sample.text}
    else:
        choice["text"] = sample.text
    choice["logprobs"] = _logprobs(sample.logprobs, tokenizer, is_chat)
    choice["finish_reason"] = sample.finish_reason
    if token_ids:
        choice["token_ids"] = sample.token_ids
    return choice


def _logprobs(
    entries: tuple[TokenLogprobs, ...] | None, tokenizer: Tokenizer, is_chat: bool
) -> dict[str, Any] | None:
    if entries is None:
        return None
    if is_chat:
        return {"content": [_entry(entry, tokenizer) for entry in entries]}
    return _columns(entries, tokenizer)


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
