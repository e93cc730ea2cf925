"""What a model's files say about its tokenizer: the value that every loader returns."""

import dataclasses
from collections.abc import Mapping

import tokenizers


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Read from a folder or a GGUF file."""

    source: str  # where it was read, for messages
    backend: tokenizers.Tokenizer
    named: Mapping[str, str]  # "bos_token", "eos_token", "unk_token", "pad_token" -> its text
    eos_ids: frozenset[int]  # every id that any file names as an end of sequence
    prefix: tuple[int, ...]  # ids that go before a text (BOS)
    suffix: tuple[int, ...]  # ids that go after it
    chat_template: str | None
