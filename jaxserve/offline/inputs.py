"""The input of a batch job: one file or several, plain or compressed, looked through once before
anything heavy starts.

The look gives every line its identity: its custom_id, else its content and its place among equal
contents.  That is what a journal remembers of a finished line.
"""

import glob
import hashlib
import io
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from jaxserve.offline import tasks
from jaxserve.offline.codecs import MissingPackage, codec_of
from jaxserve.offline.errors import InputError
from jaxserve.offline.jsonl import Line, Place, parse_object, raw_lines
from jaxserve.offline.storage import Storage
from jaxserve.openai_api.errors import RequestError, shorten

ID_BYTES = 16
_MADE_UP = "line-"


class InputFile(NamedTuple):
    storage: Storage
    path: str
    name: str  # as messages give it


class Scan(NamedTuple):
    """What one look at all lines gave."""

    identities: np.ndarray  # u8[N, ID_BYTES], all different
    numbers: np.ndarray  # u32[N], line numbers
    unnamed: np.ndarray  # i64, indices of the lines without a custom_id
    digest: str  # of the content, whatever the compression

    @property
    def num_lines(self) -> int:
        return len(self.identities)


class Input:
    """Can be read any number of times."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self.files = list(files)

    def lines(self, skip: np.ndarray | None = None) -> Iterator[Line]:
        """Every line that is not blank; without those whose index `skip` (bool[N]) is true for."""
        skipped = b"" if skip is None else skip.tobytes()
        index = base = last = 0
        several = len(self.files) > 1
        for file in self.files:
            with open_input(file) as stream:
                for line, data in raw_lines(stream):
                    if index >= len(skipped) or not skipped[index]:
                        name, inner = (file.name, line) if several else ("", 0)
                        yield Line(Place(base + line, index, name, inner), data)
                    index += 1
                    last = line
            base, last = base + last, 0

    def scan(self) -> Scan:
        """Raises InputError when two lines have one custom_id, naming both, or when a file cannot
        be read."""
        looker = _Look()
        digests = hashlib.sha256()
        base = 0
        for file in self.files:
            try:
                digest, base = looker.read(file, base)
            except OSError as error:
                raise InputError(f"{file.name} cannot be read: {_reason(error)}") from error
            digests.update(digest)
        identities = np.frombuffer(looker.digests, np.uint8).reshape(-1, ID_BYTES)
        unnamed = np.array(looker.unnamed, np.int64)
        numbers = np.frombuffer(looker.numbers, np.uint32)
        self._refuse_made_up_twice(looker, numbers)
        identities = self._tell_apart(identities, unnamed)
        return Scan(identities, numbers, unnamed, digests.hexdigest())

    def _refuse_made_up_twice(self, looker: "_Look", numbers: np.ndarray) -> None:
        """`line-3` as a custom_id, and line 3 without one."""
        made_up = {int(numbers[index]): index for index in looker.unnamed} if looker.like else {}
        for name, index in looker.like:
            other = made_up.get(_number_in(name))
            if other is not None and self._made_up(other) == name:
                self._refuse(min(index, other), max(index, other), name)

    def _made_up(self, index: int) -> str | None:
        """The name that a line without a custom_id runs under; None when it cannot run."""
        for line in self.lines():
            if line.place.index == index:
                try:
                    return tasks.custom_id(parse_object(line), line.number)
                except RequestError:
                    return None
        return None

    def _tell_apart(self, identities: np.ndarray, unnamed: np.ndarray) -> np.ndarray:
        """Equal contents get an ordinal; equal ids are refused."""
        groups = _repeated(identities)
        if not groups:
            return identities
        identities = identities.copy()
        is_unnamed = np.zeros(len(identities), bool)
        is_unnamed[unnamed] = True
        suspects = {i for group in groups for i in group if not is_unnamed[i]}
        strict = self._strict_ids(suspects) if suspects else {}
        for group in groups:
            first: dict[str, int] = {}
            for ordinal, index in enumerate(group):
                name = strict.get(index)
                if name is not None:
                    if name in first:
                        self._refuse(first[name], index, name)
                    first[name] = index
                if ordinal:
                    key = b"ordinal %d" % ordinal
                    digest = blake2b(identities[index], digest_size=ID_BYTES, key=key).digest()
                    identities[index] = np.frombuffer(digest, np.uint8)
        return identities

    def _strict_ids(self, indices: set[int]) -> dict[int, str | None]:
        return {
            line.place.index: _strict_id(line)
            for line in self.lines()
            if line.place.index in indices
        }

    def _refuse(self, first: int, second: int, name: str) -> None:
        a, b = (line.place for line in self.lines() if line.place.index in (first, second))
        if a.file:
            raise InputError(f"{a} and {b} have the same custom_id {shorten(name)}")
        raise InputError(
            f"{self.files[0].name}: lines {a.number} and {b.number} have the same custom_id "
            f"{shorten(name)}; give every line its own"
        )


def open_input(file: InputFile) -> BinaryIO:
    """Decoded bytes.  Raises OSError."""
    raw = file.storage.open(file.path)
    try:
        return codec_of(file.path).reader(raw)
    except MissingPackage as error:
        raise InputError(str(error)) from error


def expand(argument: str, leave_out: Callable[[str], bool] = lambda name: False) -> list[str]:
    """The files that an argument names; a name with *, ? or [ that is no file is a pattern, and
    fits neither folders nor what is to be left out.

    Raises InputError when a pattern fits nothing.
    """
    if os.path.lexists(argument) or not glob.has_magic(argument):
        return [argument]
    found = sorted(
        name for name in glob.glob(argument) if not (os.path.isdir(name) or leave_out(name))
    )
    if not found:
        raise InputError(f"no file fits {argument}")
    return found


class _Head(msgspec.Struct):
    """The only field of a line that the first look needs."""

    custom_id: Any = None


_decode_head = msgspec.json.Decoder(_Head).decode


class _Look:
    """Collects what a scan gives, line by line and lean: a million lines take seconds."""

    def __init__(self) -> None:
        self.digests = bytearray()
        self.numbers = array("I")
        self.unnamed = array("q")
        self.like: list[tuple[str, int]] = []  # custom_ids that look like made-up ones

    def read(self, file: InputFile, base: int) -> tuple[bytes, int]:
        """Digest of the content, and the number of the last line."""
        with open_input(file) as stream:
            hashing = _Hashing(stream)
            number = 0
            count = len(self.numbers)
            buffered = io.BufferedReader(hashing, 1 << 20)
            for number, data in raw_lines(cast(BinaryIO, buffered)):
                name = _quick_id(base + number, data)
                if name is None:
                    self.unnamed.append(count)
                    content = b"%d" % (base + number) if data is None else data.strip()
                    self.digests += blake2b(content, digest_size=ID_BYTES, key=b"content").digest()
                else:
                    self.digests += blake2b(name.encode(), digest_size=ID_BYTES).digest()
                    if name.startswith(_MADE_UP):
                        self.like.append((name, count))
                self.numbers.append(base + number)
                count += 1
            return hashing.digest(), base + number


class _Hashing(io.RawIOBase):
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        self._hash.update(data)
        buffer[: len(data)] = data
        return len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


def _quick_id(number: int, data: bytes | None) -> str | None:
    """`_strict_id`, ten times as fast: it may name an id for a line that has none, never the other
    way round, and whatever is found twice is looked at again."""
    try:
        name = _decode_head(data or b"").custom_id
    except (ValueError, RecursionError):
        return _strict_id(Line(Place(number), data))
    if name is None:
        return None
    try:
        return name if isinstance(name, str) and name.encode() else None
    except UnicodeEncodeError:
        return None


def _strict_id(line: Line) -> str | None:
    """The custom_id that a line gives; None when it gives no valid one."""
    try:
        value = parse_object(line)
    except RequestError:
        return tasks.salvaged_id(line.data)
    try:
        return None if value.get("custom_id") is None else tasks.custom_id(value, line.number)
    except RequestError:
        return None


def _repeated(identities: np.ndarray) -> list[list[int]]:
    """Groups of indices, in order, whose identities are equal."""
    pairs = identities.view(np.uint64)
    order = np.argsort(pairs[:, 0], kind="stable")
    high = pairs[order, 0]
    equal = np.flatnonzero(high[1:] == high[:-1])
    groups: dict[bytes, list[int]] = {}
    for index in sorted({int(i) for at in equal for i in (order[at], order[at + 1])}):
        groups.setdefault(identities[index].tobytes(), []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def _number_in(name: str) -> int:
    digits = name.removeprefix(_MADE_UP)
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 12 else -1


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
