"""A tokenizer from a model folder: tokenizer.json and the files around it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import tokenizers

from jaxserve.text.parts import TokenizerParts

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_folder(folder: Path) -> TokenizerParts:
    """Only tokenizer.json must be there.  Raises ValueError when a file is missing or damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; "
            f"save the model's fast tokenizer there, or use a GGUF file"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for everything
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    settings = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens([_read_json(folder / "special_tokens_map.json"), settings])
    configs = {
        name: _read_json(folder / name) for name in ("config.json", "generation_config.json")
    }
    eos = {token for name, config in configs.items() for token in _eos_ids(config, folder / name)}
    eos |= {token for token in [_id_of(backend, named.get("eos_token"))] if token is not None}
    prefix, suffix = _edges(backend)
    bos_id = _id_of(backend, named.get("bos_token"))
    eos_id = _id_of(backend, named.get("eos_token"))
    return TokenizerParts(
        source=str(folder),
        backend=backend,
        named=named,
        eos_ids=frozenset(eos),
        prefix=_override(prefix, settings.get("add_bos_token"), bos_id),
        suffix=_override(suffix, settings.get("add_eos_token"), eos_id),
        chat_template=_chat_template(folder, settings),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no valid UTF-8: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return cast(dict[str, Any], value)


def _named_tokens(files: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Of each name the last file's; a token is written as its text or as an object with its
    content."""
    named: dict[str, str] = {}
    for file in files:
        for name in _NAMES:
            value = file.get(name)
            text = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[name] = text
    return named


def _eos_ids(config: Mapping[str, Any], path: Path) -> list[int]:
    """From `eos_token_id`, a number or a list, also of the text part of a multimodal config."""
    found: list[int] = []
    sections: list[Mapping[str, Any]] = [config, config.get("text_config") or {}]
    for section in sections:
        value = section.get("eos_token_id")
        ids = cast(list[Any], value if isinstance(value, list) else [value])
        if value is None:
            continue
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(
                f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them"
            )
        found += ids
    return found


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _edges(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor of tokenizer.json puts before and after a text."""
    whole = backend.encode("a").ids
    plain = backend.encode("a", add_special_tokens=False).ids
    start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain) if plain else 0
    return tuple(whole[:start]), tuple(whole[start + len(plain) :])


def _override(edge: tuple[int, ...], wanted: bool | None, token: int | None) -> tuple[int, ...]:
    """`add_bos_token` and `add_eos_token`, where the folder gives them, go over tokenizer.json."""
    if wanted is None or token is None:
        return edge
    if wanted:
        return edge if token in edge else (token, *edge)
    return tuple(other for other in edge if other != token)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template file goes before the older places; of named templates the one called default is
    taken."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = template or settings.get("chat_template")
    if isinstance(template, list):
        entries = cast(list[dict[str, Any]], template)
        named = [entry.get("template") for entry in entries if entry.get("name") == "default"]
        template = named[0] if named else None
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: chat_template must be a string or a list of named templates")
    return template
