"""Messages of a chat to token ids, through the chat template of the model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from jaxserve.text import template
from jaxserve.text.tokenizer import Tokenizer, refuse_surrogates

_PRIVATE_USE = range(0x10FFFD, 0x100000, -1)  # characters that no text gives a meaning


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of the chat; the template alone decides about BOS.

    The text of a special token counts as that token where the template writes it, and is ordinary
    text where a message holds it, so that no message can forge another turn.  Where no message
    holds one, the ids are those of encoding the rendered text.

    Raises ValueError when the model has no chat template, when a message is not of the form
    `{"role": str, "content": str or list of {"type": "text", "text": str}}`, or when the template
    refuses.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the model has no chat template; send a plain prompt, or use an instruction-tuned model"
        )
    checked = check_messages(messages)
    marks = _marks(tokenizer, checked)
    text = template.render(
        tokenizer.chat_template,
        {
            **tokenizer.named_tokens,
            "messages": _marked(checked, marks, tokenizer.special_pattern) if marks else checked,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        },
    )
    if not marks:
        return tokenizer.encode(text, add_special=False)
    return tokenizer.encode_marked(text, {mark: literal for literal, mark in marks.items()})


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy in which every content is one string.  Raises ValueError that names the message and
    the field."""
    items = _list(messages)
    if not items:
        raise ValueError("messages must be a list with at least one message")
    return [_check_message(_mapping(message), f"messages[{i}]") for i, message in enumerate(items)]


def _check_message(message: dict[str, Any] | None, where: str) -> dict[str, Any]:
    if message is None:
        raise ValueError(
            f'{where} must be an object such as {{"role": "user", "content": "Hello"}}'
        )
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ValueError(f'{where}.role must be a string such as "user"')
    checked = message | {"content": _content(message.get("content"), f"{where}.content")}
    for path, text in _texts(checked, where):
        refuse_surrogates(text, path)
    return checked


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = _list(content)
    if parts is None:
        raise ValueError(f"{where} must be a string or a list of text parts")
    texts: list[str] = []
    for i, item in enumerate(parts):
        part = _mapping(item) or {}
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'{where}[{i}] must be {{"type": "text", "text": "..."}}; '
                f"other parts are not supported"
            )
        texts.append(part["text"])
    return "".join(texts)


def _list(value: Any) -> list[Any] | None:
    return list(cast(Sequence[Any], value)) if isinstance(value, list | tuple) else None


def _mapping(value: Any) -> dict[str, Any] | None:
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else None


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Every string in a message, keys too, with its path."""
    if isinstance(value, str):
        yield where, value
    for key, item in (_mapping(value) or {}).items():
        yield where, str(key)
        yield from _texts(item, f"{where}.{key}")
    for i, item in enumerate(_list(value) or []):
        yield from _texts(item, f"{where}[{i}]")


def _marks(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> dict[str, str]:
    """For each special token whose text a message holds, a character that no message holds."""
    texts = [text for _, text in _texts(messages, "")]
    found = sorted({match for text in texts for match in tokenizer.special_pattern.findall(text)})
    if not found:
        return {}
    used = {char for text in texts for char in text}
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    return dict(zip(found, free, strict=False))


def _marked(value: Any, marks: Mapping[str, str], pattern: re.Pattern[str]) -> Any:
    """A copy in which each such text is replaced by its character, while the template runs."""
    if isinstance(value, str):
        return pattern.sub(lambda match: marks[match[0]], value)
    mapping, items = _mapping(value), _list(value)
    if mapping is not None:
        return {
            _marked(key, marks, pattern): _marked(item, marks, pattern)
            for key, item in mapping.items()
        }
    if items is not None:
        return [_marked(item, marks, pattern) for item in items]
    return value
