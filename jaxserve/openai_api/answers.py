"""Answers in the form of OpenAI's API."""

import functools
import time
from collections.abc import Sequence
from typing import Any

from jaxserve.completion import Chunk, Completion, Sample, Usage
from jaxserve.request import TokenLogprobs
from jaxserve.text.detokenizer import Detokenizer
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
    samples = [(done.prompt_token_ids, sample) for done in completions for sample in done.outputs]
    result: dict[str, Any] = {
        **head(model=model, name=name, is_chat=is_chat, streamed=False),
        "choices": [
            Choice(index, prompt, tokenizer, is_chat=is_chat, token_ids=token_ids).write(sample)
            for index, (prompt, sample) in enumerate(samples)
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


class Choice:
    """One choice of an answer: whole from its sample, or bit by bit from its chunks."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        is_chat: bool,
        token_ids: bool,
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._token_ids = token_ids
        self._prompt = prompt
        self._place = 0  # characters of the tokens so far

    @functools.cached_property
    def _places(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, self._prompt)

    def write(self, part: Sample | Chunk) -> dict[str, Any]:
        """Its entry in `choices`; of a chunk what it adds, for an event of a stream."""
        choice: dict[str, Any] = {"index": self._index}
        if not self._is_chat:
            choice["text"] = part.text
        elif isinstance(part, Sample):
            choice["message"] = {"role": "assistant", "content": part.text}
        else:
            choice["delta"] = {"content": part.text} if part.text else {}
        choice["logprobs"] = None if part.logprobs is None else self._logprobs(part.logprobs)
        choice["finish_reason"] = part.finish_reason
        if self._token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _logprobs(self, entries: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": [_entry(entry, self._tokenizer) for entry in entries]}
        return _columns(entries, self._tokenizer) | {"text_offset": self._offsets(entries)}

    def _offsets(self, entries: tuple[TokenLogprobs, ...]) -> list[int]:
        """Where the text of each token begins: how many characters of the choice's text were
        complete before it.  Tokens that together are one character begin at one place."""
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._place)
            self._place += len(self._places.push((entry.token,)))
        return offsets


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
