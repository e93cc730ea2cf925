"""Text of a growing token sequence."""

import codecs
from collections.abc import Iterable, Sequence

from jaxserve.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8
_Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns output tokens into text as they come; the cost of a token does not depend on what came
    before.

    Special tokens give no text.  The deltas joined are `tokenizer.decode(ids)`; after a prompt they
    are what decoding prompt and output together adds to the text of the prompt, so a first output
    token keeps its leading space.  At most three bytes are held back: the beginning of a character
    that the next token may complete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Decoder("replace")
        self._decoder.decode(_last_bytes(tokenizer, prompt_ids))
        self._prompt_open = self._decoder.getstate()[0] != b""  # the prompt ends inside a character
        self._at_start = tokenizer.strips_first_space and not any(
            map(tokenizer.piece, reversed(prompt_ids))
        )

    def push(self, ids: Iterable[int]) -> str:
        """Text that is final now."""
        data = b"".join(map(self._tokenizer.piece, ids))
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._own(self._decoder.decode(data))

    def flush(self) -> str:
        """The rest, at the end of the sequence: U+FFFD when it ends inside a character."""
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """Without the replacement of a character that the prompt left open and the output did not
        complete."""
        if self._prompt_open and text:
            self._prompt_open = False
            return text.removeprefix("\N{REPLACEMENT CHARACTER}")
        return text


def _last_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The end of a text, long enough to hold its last character."""
    data = b""
    for token in reversed(ids):
        data = tokenizer.piece(token) + data
        if len(data) >= _LONGEST_CHARACTER:
            break
    return data
