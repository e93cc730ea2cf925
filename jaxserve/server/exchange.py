"""One request in flight: what the engine brought for it and its client has not got yet."""

import asyncio
from collections.abc import Callable

from jaxserve.completion import Chunk
from jaxserve.driver import Generation

_CHUNK_BYTES = 64  # about what a chunk takes beside its text
_ENTRY_BYTES = 512  # about what the logprobs of one token take


class Exchange:
    """The generations of one request, and a bounded buffer of their chunks.

    Choice `p * n + s` is sample `s` of prompt `p`.  Chunks that nobody takes are joined when they
    are taken; when they come to more than `limit` bytes, the reader is too slow (`overflowed`).
    """

    def __init__(self, generations: list[Generation], *, streams: bool, limit: int) -> None:
        self.generations = generations
        self.error: str | None = None  # why a sample failed, if one did
        self.overflowed = False
        self.cancelled = False
        self.cut: Callable[[], None] = lambda: None  # ends the connection without a word
        self._offsets = {
            generation: index * len(generation.samples)
            for index, generation in enumerate(generations)
        }
        self._streams = streams
        self._limit = limit
        self._chunks: list[tuple[int, Chunk]] = []
        self._size = 0
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        return all(generation.done for generation in self.generations)

    def push(self, generation: Generation, chunk: Chunk) -> None:
        """A chunk of one of the generations."""
        if chunk.finish_reason == "error":
            self.error = generation.samples[chunk.index].request.error or "generation failed"
            self._changed.set()
        if self._streams:
            self._chunks.append((self._offsets[generation] + chunk.index, chunk))
            entries = len(chunk.logprobs or ())
            self._size += _CHUNK_BYTES + len(chunk.text) * 2 + entries * _ENTRY_BYTES
            self.overflowed = self._size > self._limit
            self._changed.set()
        elif self.done:
            self._changed.set()

    def cancel(self) -> None:
        """Nobody is there any more."""
        self.cancelled = True
        self._changed.set()

    async def finished(self) -> None:
        """Waits until it is done, failed or cancelled."""
        while not (self.done or self.error or self.cancelled):
            self._changed.clear()
            await self._changed.wait()

    async def take(self) -> list[tuple[int, Chunk]]:
        """What has come since the last call, one chunk a choice; waits for something.

        Nothing comes after the end, nor when it was cancelled.
        """
        while not (self._chunks or self.done or self.cancelled):
            self._changed.clear()
            await self._changed.wait()
        if self.cancelled:
            return []
        chunks, self._chunks, self._size = self._chunks, [], 0
        return chunks if len(chunks) < 2 else _joined(chunks)


def _joined(chunks: list[tuple[int, Chunk]]) -> list[tuple[int, Chunk]]:
    by_choice: dict[int, list[Chunk]] = {}
    for choice, chunk in chunks:
        by_choice.setdefault(choice, []).append(chunk)
    return [(choice, _join(parts)) for choice, parts in by_choice.items()]


def _join(parts: list[Chunk]) -> Chunk:
    if len(parts) == 1:
        return parts[0]
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = tuple(entry for part in parts for entry in part.logprobs or ())
    return Chunk(
        parts[0].index,
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.token_ids),
        logprobs,
        parts[-1].finish_reason,
    )
