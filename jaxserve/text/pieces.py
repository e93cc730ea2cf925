"""The bytes that each token stands for.

A text is decoded as bytes: the pieces of the tokens, one after the other, read as UTF-8, where what
is invalid becomes U+FFFD.  For byte-level tokenizers that is what `tokenizers` does.  For
byte-fallback tokenizers `tokenizers` replaces every byte of a run that is invalid anywhere, so that
one bad byte takes valid characters with it and a stream would have to hold the whole run; here only
the invalid bytes are replaced, as SentencePiece does.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

type Step = Callable[[str | bytes], str | bytes]  # bytes: already final

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, slots=True)
class PieceRule:
    """How the decoder of a tokenizer turns one token into bytes."""

    steps: tuple[Step, ...]
    strip: bool = False  # one space at the very start of a text is dropped: encoding put it there

    def piece(self, token: str) -> bytes:
        value: str | bytes = token
        for step in self.steps:
            value = step(value)
        return value.encode("utf-8") if isinstance(value, str) else value


def piece_rule(backend: tokenizers.Tokenizer, source: str) -> PieceRule:
    """Reads the decoder of a tokenizer.  Raises ValueError when a token's text depends on more than
    the token."""
    decoder = backend.decoder
    if decoder is None:
        raise ValueError(
            f"{source} has no decoder; a ByteLevel, ByteFallback or Metaspace decoder is needed"
        )
    spec = json.loads(decoder.__getstate__())
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    steps: list[Step] = []
    strip = fused = False
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and _is_one_leading_space(part):
            strip = True
        elif kind == "Metaspace":
            steps.append(_replace(part["replacement"], " "))
            strip = strip or part.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and "String" in part["pattern"]:
            steps.append(_replace(part["pattern"]["String"], part["content"]))
        elif kind in _PLAIN_STEPS:
            steps.append(_PLAIN_STEPS[kind])
        else:
            raise ValueError(
                f"{source}: its decoder has the step {json.dumps(part)}, which is not known here; "
                f"known: ByteLevel, ByteFallback, Metaspace, Fuse, Replace of a string, "
                f"Strip of one leading space"
            )
    return PieceRule(tuple(steps), strip)


def _is_one_leading_space(part: dict[str, Any]) -> bool:
    return (part["content"], part["start"], part["stop"]) == (" ", 1, 0)


def _replace(old: str, new: str) -> Step:
    return lambda value: value.replace(old, new) if isinstance(value, str) else value


def _byte_level_alphabet() -> dict[str, int]:
    """The character that GPT-2's byte-level BPE writes for each byte (Radford et al. 2019,
    encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


def _byte_level(value: str | bytes) -> str | bytes:
    """Tokens that are not all in the alphabet (added ones) stand for themselves."""
    if isinstance(value, bytes) or any(char not in _ALPHABET for char in value):
        return value
    return bytes(_ALPHABET[char] for char in value)


def _byte_fallback(value: str | bytes) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(value) if isinstance(value, str) else None
    return bytes([int(match[1], 16)]) if match else value


_PLAIN_STEPS: dict[str, Step] = {"ByteLevel": _byte_level, "ByteFallback": _byte_fallback}
