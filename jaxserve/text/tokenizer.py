"""Text to token ids and back, for every kind of model folder or file."""

import functools
import json
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from jaxserve.text.from_folder import read_folder
from jaxserve.text.from_gguf import read_gguf
from jaxserve.text.parts import TokenizerParts
from jaxserve.text.pieces import piece_rule


def load_tokenizer(path: Path) -> "Tokenizer":
    """From a folder with tokenizer.json or from a .gguf file.  Raises ValueError that says what is
    wrong with it."""
    if path.is_dir():
        return Tokenizer(read_folder(path))
    if path.is_file():
        return Tokenizer(read_gguf(path))
    raise ValueError(f"{path} does not exist; name a folder with tokenizer.json or a .gguf file")


def refuse_surrogates(text: str, what: str) -> None:
    """Raises ValueError when `text` holds half a surrogate pair (JSON can write one, UTF-8
    cannot)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} "
            f"at character {error.start}; remove it or write the whole pair"
        ) from None


class Tokenizer:
    """Safe to share between threads: encoding releases the interpreter lock and changes nothing."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        self._rule = piece_rule(parts.backend, parts.source)
        added = parts.backend.get_added_tokens_decoder()
        special = {token: entry.content for token, entry in added.items() if entry.special}
        self.special_ids = {text: token for token, text in special.items()}  # text -> id
        self.vocab_size = 1 + max(parts.backend.get_vocab().values())  # highest id + 1
        self.eos_ids = parts.eos_ids
        self.chat_template = parts.chat_template
        self.named_tokens = dict(parts.named)  # "bos_token" -> its text
        self.strips_first_space = self._rule.strip  # of a whole text: encoding put it there
        self._special_pieces = {token: self._rule.piece(text) for token, text in special.items()}
        self._pieces: dict[int, bytes] = dict.fromkeys(special, b"")

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids.  `add_special` adds what the model wants around a text (BOS), unless the text
        already begins (ends) with it; without `parse_special`, the text of a special token in
        `text` is ordinary text.

        Raises ValueError for a lone surrogate.
        """
        refuse_surrogates(text, "text")
        backend = self._backend if parse_special else self._guard[0]
        ids = backend.encode(text, add_special_tokens=False).ids
        if not add_special:
            return ids
        prefix, suffix = list(self._parts.prefix), list(self._parts.suffix)
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if suffix and ids[-len(suffix) :] != suffix:
            ids += suffix
        return ids

    def encode_marked(self, text: str, literals: dict[str, str]) -> list[int]:
        """Ids of a text in which special tokens count, but the characters that are keys of
        `literals` stand for the ordinary text given there.  Nothing is added around it."""
        guard, renamed = self._guard
        pattern = re.compile(
            "|".join(map(re.escape, literals)) + "|" + self.special_pattern.pattern
        )
        replacements = renamed | literals
        text = pattern.sub(lambda match: replacements[match[0]], text)
        return guard.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of the ids, without any clean-up of spaces.  Invalid UTF-8 becomes U+FFFD; ids
        outside the vocabulary give nothing."""
        if skip_special:
            data = b"".join(map(self.piece, ids))
        else:
            special = self._special_pieces
            data = b"".join(
                special[token] if token in special else self.piece(token) for token in ids
            )
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none for a special token or an id that is no
        token."""
        piece = self._pieces.get(token)
        if piece is None:
            text = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
            if text is None:
                return b""
            piece = self._pieces[token] = self._rule.piece(text)
        return piece

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and generation_config.json into an existing
        folder, so that loading the folder gives an equal tokenizer."""
        parts = self._parts
        spec = json.loads(parts.backend.to_str())
        spec["post_processor"] = _post_processor(parts)
        _write_json(folder / "tokenizer.json", spec)
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **parts.named,
        }
        if parts.chat_template is not None:
            settings["chat_template"] = parts.chat_template
        _write_json(folder / "tokenizer_config.json", settings)
        if parts.eos_ids:
            _write_json(folder / "generation_config.json", {"eos_token_id": sorted(parts.eos_ids)})

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds the text of any special token, of two at one place the longer."""
        texts = sorted(self.special_ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @functools.cached_property
    def _guard(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """The same tokenizer with its special tokens renamed to what no text holds, and the new
        names."""
        secret = secrets.token_hex(8)
        renamed = {text: f"\ue000{secret}{token}\ue001" for text, token in self.special_ids.items()}
        spec = json.loads(self._backend.to_str())
        spec["post_processor"] = None
        for entry in spec["added_tokens"]:
            entry["content"] = renamed.get(entry["content"], entry["content"])
        model = spec["model"]
        model["unk_token"] = renamed.get(model.get("unk_token"), model.get("unk_token"))
        if isinstance(model["vocab"], dict):
            model["vocab"] = {
                renamed.get(text, text): token for text, token in model["vocab"].items()
            }
        else:
            model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
        return tokenizers.Tokenizer.from_str(json.dumps(spec)), renamed


def _post_processor(parts: TokenizerParts) -> Any:
    """The prefix and suffix, written for tokenizer.json."""
    edges = {token: parts.backend.id_to_token(token) for token in (*parts.prefix, *parts.suffix)}
    if not edges:
        return None
    before, after = ([edges[token] for token in edge] for edge in (parts.prefix, parts.suffix))
    template = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(text, token) for token, text in edges.items()],
    )
    return json.loads(template.__getstate__())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
