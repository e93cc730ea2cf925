"""The output of a job beside its journal: what is in both, whole, is done.

`OUT` (or its parts, when it is rolled by size) is only ever appended to.  `OUT.journal/` holds
`records-00001`, one file a part.  Bytes of the output are written before the records that vouch
for them; a mark follows when both are synced; what comes back after a crash is the longest run
of whole blocks, which holds everything that was ever synced.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxserve.offline import journal
from jaxserve.offline.codecs import Plain, codec_of
from jaxserve.offline.journal import Block, Entry
from jaxserve.offline.storage import Appender, Storage, read_all

if TYPE_CHECKING:
    from jaxserve.offline.job import Outcome
    from jaxserve.offline.jsonl import Place

MOST_UNSYNCED = 16 << 20  # bytes; a sync comes earlier when so much waits for it
_CHUNK = 4 << 20
_COMMIT, _SIDE = "rewrite-commit", ".rewritten"


class Damaged(ValueError):
    """Finished results are not where the journal says they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Names of the files of one output."""

    output: str
    rolled: bool = False  # numbered parts in place of one file

    @property
    def folder(self) -> str:
        return f"{self.output}.journal"

    def part(self, number: int) -> str:
        """out.jsonl.gz -> out-00001.jsonl.gz; parts count from 1."""
        if not self.rolled:
            return self.output
        folder, slash, name = self.output.rpartition("/")
        stem, dot, suffixes = name.partition(".")
        return f"{folder}{slash}{stem}-{number:05}{dot}{suffixes}"

    def records(self, number: int) -> str:
        return f"{self.folder}/records-{number:05}"


@dataclasses.dataclass(frozen=True, slots=True)
class Syncing:
    """When results become durable, and when a part is full."""

    seconds: float
    roll_bytes: int | None = None
    clock: Callable[[], float] = time.monotonic


class Lines(NamedTuple):
    """The lines of an input."""

    identities: np.ndarray  # u8[N, 16]
    finished: np.ndarray  # bool[N], those that have a result


class Part(NamedTuple):
    """One file of results as it was found, with its journal."""

    number: int
    data: bytes  # of the journal
    blocks: list[Block]
    good: list[bool]  # the output holds it
    synced: int  # bytes of the output that were durable once
    journal_end: int
    exists: bool  # the file of results

    @property
    def whole(self) -> int:
        """How many blocks hold before the first that does not."""
        return self.good.index(False) if False in self.good else len(self.good)

    @property
    def end(self) -> int:
        """Bytes of the output that hold."""
        whole = self.whole
        return self.blocks[whole - 1].start + self.blocks[whole - 1].length if whole else 0

    @property
    def cut(self) -> int:
        """Bytes of the journal that belong to them."""
        whole = self.whole
        if whole == len(self.blocks):
            return self.journal_end
        block = self.blocks[whole]
        return (block.first - 1) * journal.RECORD

    def trimmed(self) -> "Part":
        """Without what lies behind the first block that does not hold: it is going to be cut."""
        whole = self.whole
        return self._replace(good=[at < whole for at in range(len(self.good))])

    @property
    def lines(self) -> np.ndarray:
        """Of every block that holds."""
        kept = [block for block, good in zip(self.blocks, self.good, strict=True) if good]
        return journal.lines_of(self.data, kept)


def load(storage: Storage, layout: Layout) -> list[Part]:
    """Every part as it stands; changes nothing."""
    numbers = [
        int(name.removeprefix("records-"))
        for name in storage.names(layout.folder)
        if name.startswith("records-") and not name.endswith((_SIDE, ".new"))
    ]
    return [_load_part(storage, layout, number) for number in numbers]


def refuse_damage(parts: list[Part], layout: Layout) -> None:
    """Raises Damaged when something that was synced does not hold any more."""
    for part in parts:
        path = layout.part(part.number)
        if part.synced and not part.exists:
            raise Damaged(f"{path} is gone, but its journal has results in it; put it back")
        last = part is parts[-1]
        wanted = part.synced if last else max(part.synced, _end_of(part.blocks))
        if part.end < wanted:
            raise Damaged(
                f"{path} was changed or damaged: from byte {part.end} on it does not hold what its "
                f"journal says"
            )


def finish_rewrite(storage: Storage, layout: Layout) -> None:
    """Ends a rewrite that was decided before a crash, and forgets one that was not."""
    names = storage.names(layout.folder)
    decided = _COMMIT in names
    for name in names:
        if name.startswith("records-") and name.endswith(_SIDE):
            number = int(name.removeprefix("records-").removesuffix(_SIDE))
            for path in (layout.part(number), layout.records(number)):
                if decided:
                    storage.rename(path + _SIDE, path)
                else:
                    storage.remove(path + _SIDE)
    if decided:
        storage.remove(f"{layout.folder}/{_COMMIT}")


def rewrite(
    storage: Storage, layout: Layout, parts: list[Part], keep: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Writes the parts anew with those lines alone for which `keep` is true.

    `keep` takes records of lines (`journal.LINES`) and returns a mask.  A crash leaves the old
    files or the new ones.
    """
    changed = False
    for part in parts:
        lines = part.lines
        mask = keep(lines)
        if mask.all() and all(part.good):
            continue
        changed = True
        _rewrite_part(storage, layout, part, mask)
    if changed:
        storage.put(f"{layout.folder}/{_COMMIT}", b"")
        finish_rewrite(storage, layout)


class Output:
    """A sink that journals.  Results are visible after `flush` (compressed ones, and those in an
    object store, after `sync`) and durable after `sync`."""

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        parts: list[Part],
        lines: Lines,
        syncing: Syncing,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        """`lines.finished` is kept up to date here; `renew` is called all the time.  What does not
        hold of the last part is cut off."""
        self._storage = storage
        self._layout = layout
        self._identities = lines.identities
        self._finished = lines.finished
        self._renew = renew
        self._syncing = syncing
        self._clock = syncing.clock
        self._codec = codec_of(layout.output)
        self._at_once = storage.appends and isinstance(self._codec, Plain)
        self._entries: list[Entry] = []  # of the block that is being gathered
        self._data = bytearray()
        self._broken = False
        self._open(parts[-1] if parts else None)

    def write(self, place: "Place", outcome: "Outcome", result: bytes) -> None:
        """A line has one result: a second one is ignored."""
        if self._finished[place.index]:
            return
        identity = self._identities[place.index].tobytes()
        self._entries.append(Entry(identity, outcome, place.number))
        self._data += result
        self._data += b"\n"
        self._finished[place.index] = True

    def flush(self) -> None:
        self._renew()
        if self._at_once:
            self._write_block()
        waiting = self._results.end - self._synced + len(self._data)
        if waiting and self._clock() >= self._sync_at or waiting > MOST_UNSYNCED:
            self.sync()

    def sync(self) -> None:
        """Raises OSError; what was synced before holds, and nothing can be written any more."""
        self._write_block()
        self._guarded(self._sync)
        limit = self._syncing.roll_bytes
        if self._layout.rolled and limit is not None and self._results.end >= limit:
            self._guarded(self._roll)

    def close(self) -> None:
        """Syncs, unless something failed before."""
        try:
            if not self._broken:
                self.sync()
                self._guarded(self._records.sync)
        finally:
            self._results.close()
            self._records.close()

    def _open(self, part: Part | None) -> None:
        self._number = 1 if part is None else part.number
        cut, end = (0, 0) if part is None else (part.cut, part.end)
        self._records = self._storage.append(self._layout.records(self._number), cut)
        try:
            self._results: Appender = self._storage.append(self._layout.part(self._number), end)
        except BaseException:
            self._records.close()
            raise
        self._synced = end
        self._sync_at = self._clock() + self._syncing.seconds

    def _write_block(self) -> None:
        if self._entries:
            self._guarded(self._put_block)

    def _put_block(self) -> None:
        block = self._codec.encode(bytes(self._data))
        self._results.write(block)
        self._records.write(journal.encode_block(self._entries, block))
        self._entries.clear()
        self._data.clear()

    def _sync(self) -> None:
        if self._results.end > self._synced:
            self._results.sync()
            self._records.sync()
            # Only now, so that a mark never outlives what it vouches for.
            self._records.write(journal.encode_mark(self._results.end))
            self._synced = self._results.end
        self._sync_at = self._clock() + self._syncing.seconds

    def _roll(self) -> None:
        self._records.sync()
        self._results.close()
        self._records.close()
        path = self._layout.part(self._number + 1)
        if self._storage.size(path):
            raise FileExistsError(f"{path} exists and is not of this job; move it away")
        self._open(Part(self._number + 1, b"", [], [], 0, 0, exists=False))

    def _guarded(self, action: Callable[[], None]) -> None:
        """After a failure the files may end anywhere: the next run finds out where."""
        if self._broken:
            raise RuntimeError("the output failed before; it takes no more results")
        self._broken = True
        action()
        self._broken = False


def no_lines() -> np.ndarray:
    return np.zeros(0, journal.LINES)


def _load_part(storage: Storage, layout: Layout, number: int) -> Part:
    data = read_all(storage, layout.records(number))
    parsed = journal.parse(data)
    path = layout.part(number)
    exists = storage.size(path) is not None
    good = [False] * len(parsed.blocks)
    if exists:
        with storage.open(path) as file:
            good = journal.good_blocks(parsed.blocks, iter(lambda: file.read(_CHUNK), b""))
    return Part(number, data, parsed.blocks, good, parsed.synced, parsed.end, exists)


def _end_of(blocks: list[Block]) -> int:
    return blocks[-1].start + blocks[-1].length if blocks else 0


def _rewrite_part(storage: Storage, layout: Layout, part: Part, mask: np.ndarray) -> None:
    codec = codec_of(layout.output)
    records = storage.append(layout.records(part.number) + _SIDE, 0)
    results = storage.append(layout.part(part.number) + _SIDE, 0)
    try:
        at = 0
        for block, data in _good_data(storage, layout, part):
            rows = journal.lines_of(part.data, [block])
            texts = codec.decode(data).splitlines(keepends=True)
            kept = mask[at : at + len(rows)]
            at += len(rows)
            entries = [
                Entry(row["identity"].tobytes(), int(row["outcome"]), int(row["number"]))
                for row in rows[kept]
            ]
            if entries:
                texts = [text for text, good in zip(texts, kept, strict=True) if good]
                encoded = codec.encode(b"".join(texts))
                results.write(encoded)
                records.write(journal.encode_block(entries, encoded))
        results.sync()
        records.sync()
        records.write(journal.encode_mark(results.end))
        records.sync()
    finally:
        results.close()
        records.close()


def _good_data(storage: Storage, layout: Layout, part: Part) -> Iterator[tuple[Block, bytes]]:
    if not any(part.good):
        return
    with storage.open(layout.part(part.number)) as file:
        for block, good in zip(part.blocks, part.good, strict=True):
            if good:
                file.seek(block.start, os.SEEK_SET)
                yield block, file.read(block.length)
