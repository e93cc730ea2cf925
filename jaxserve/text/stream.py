"""Output text that ends at a stop string."""

from collections.abc import Iterable, Sequence

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer, refuse_surrogates


class TextStream:
    """Text of one request's output, cut before the first stop string.

    Characters are looked at one after the other, and the first stop string that is complete ends
    the text; when several are complete with the same character, the one that begins first.  So the
    result does not depend on how the text was cut into tokens.  No character is given out while it
    may still become part of a stop string.

    A stop string that is complete with one of the first `min_tokens` tokens does not end the text;
    one that a later token completes does, wherever it began (as in vLLM).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
    ) -> None:
        """Raises ValueError for an empty stop string or one that is not valid Unicode."""
        for number, string in enumerate(stop):
            if not string:
                raise ValueError(
                    f"stop[{number}] is empty; an empty stop string would match at once"
                )
            refuse_surrogates(string, f"stop[{number}]")
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._matchers = [_Matcher(string) for string in stop]
        self._min_tokens = min_tokens
        self._emitted: list[str] = []
        self._held = ""  # the longest end of the text that is the beginning of a stop string
        self.stopped: str | None = None  # the stop string that ended the text
        self.num_tokens_used = 0  # output tokens pushed until the text was complete

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._emitted) > 1:
            self._emitted = ["".join(self._emitted)]
        return "".join(self._emitted)

    def push(self, ids: Iterable[int]) -> str:
        """Text that is final now.  Tokens after the end of the text are ignored."""
        if not self._matchers:
            tokens = tuple(ids)
            self.num_tokens_used += len(tokens)
            return self._emit(self._detokenizer.push(tokens))
        deltas: list[str] = []
        for token in ids:
            if self.stopped is not None:
                break
            self.num_tokens_used += 1
            deltas.append(self._take(self._detokenizer.push((token,))))
        return self._emit("".join(deltas))

    def flush(self) -> str:
        """The rest, at the end of the request."""
        if self.stopped is not None:
            return ""
        delta = self._take(self._detokenizer.flush())
        held, self._held = self._held, ""
        return self._emit(delta + held)

    def _emit(self, delta: str) -> str:
        if delta:
            self._emitted.append(delta)
        return delta

    def _take(self, delta: str) -> str:
        """Adds `delta` to the text and returns what can no longer be part of a stop string."""
        if not delta or not self._matchers:
            return delta
        text = self._held + delta
        if self.num_tokens_used <= self._min_tokens:
            for matcher in self._matchers:
                matcher.skip(delta)
            return self._release(text)
        ends = [(end, matcher) for matcher in self._matchers if (end := matcher.find_end(delta))]
        if ends:
            end, first = min(ends, key=lambda match: (match[0], -len(match[1].pattern)))
            self.stopped, self._held = first.pattern, ""
            return text[: len(text) - len(delta) + end - len(first.pattern)]
        return self._release(text)

    def _release(self, text: str) -> str:
        """All of `text` but its end that may become a stop string."""
        kept = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[kept:]
        return text[:kept]


class _Matcher:
    """Finds one string in a text that comes in parts, each character looked at once (Knuth, Morris,
    Pratt 1977)."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0  # characters of the pattern that the text so far ends with
        self._border = [0] * len(
            pattern
        )  # longest proper prefix of pattern[: i + 1] that is also its suffix
        for i in range(1, len(pattern)):
            self._border[i] = self._next(self._border[i - 1], pattern[i])

    def find_end(self, part: str) -> int:
        """Position in `part` just after the first occurrence; 0: none is complete yet."""
        matched, position = self.matched, 0
        while position < len(part):
            if not matched:
                position = part.find(self.pattern[0], position)
                if position < 0:
                    break
            matched = self._next(matched, part[position])
            position += 1
            if matched == len(self.pattern):
                break
        self.matched = matched
        return position if matched == len(self.pattern) else 0

    def skip(self, part: str) -> None:
        """Takes `part` in; occurrences that end in it do not count."""
        for char in part:
            self.matched = self._next(self.matched, char)
            if self.matched == len(self.pattern):
                self.matched = self._border[-1]

    def _next(self, matched: int, char: str) -> int:
        while matched and self.pattern[matched] != char:
            matched = self._border[matched - 1]
        return matched + (self.pattern[matched] == char)
