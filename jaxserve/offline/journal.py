"""What a job has finished, as bytes: blocks of lines, and marks of what was synced.

A journal is a row of records of RECORD bytes, little endian.  A block is one header and one record
a line; it says which bytes of the output hold the results, in the same order:

    header  kind=1  -  -  lines:u32  length:u32  crc32 of the output bytes  crc32 of this block  -
    line    kind=2  outcome  -  number:u32  identity:16 bytes
    mark    kind=3  -  -  length of the output that was synced:u64  -  crc32

Blocks follow one another in the output without gaps.  A block holds when both checksums do, so
nothing depends on the order in which a disk wrote.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

RECORD = 24
BLOCK, LINE, MARK = 1, 2, 3
_HEADER = struct.Struct("<BxxxIII")  # kind, lines, length, crc of the output bytes
_HEADER_END = struct.Struct("<I4x")
_LINE = struct.Struct("<BBxxI16s")
_MARK = struct.Struct("<BxxxQ8x")
_CRC = struct.Struct("<I")
LINES = np.dtype(
    [("kind", "u1"), ("outcome", "u1"), ("-", "u2"), ("number", "<u4"), ("identity", "<u8", 2)]
)


class Entry(NamedTuple):
    """A finished line."""

    identity: bytes  # 16
    outcome: int
    number: int


class Block(NamedTuple):
    """Bytes [start, start + length) of the output, and the rows of the journal that hold its
    lines."""

    start: int
    length: int
    crc: int
    first: int  # row of its first line
    lines: int


class Parsed(NamedTuple):
    """The part of a journal that holds."""

    blocks: list[Block]
    end: int  # bytes of the journal
    synced: int  # bytes of the output that a mark vouches for; may lie beyond the last block


def encode_block(entries: Sequence[Entry], data: bytes) -> bytes:
    """The records of a block whose results are `data`, as they stand in the output."""
    lines = b"".join(
        [_LINE.pack(LINE, outcome, number, identity) for identity, outcome, number in entries]
    )
    head = _HEADER.pack(BLOCK, len(entries), len(data), zlib.crc32(data))
    return head + _HEADER_END.pack(zlib.crc32(lines, zlib.crc32(head))) + lines


def encode_mark(length: int) -> bytes:
    mark = _MARK.pack(MARK, length)
    return mark + _CRC.pack(zlib.crc32(mark))


def parse(data: bytes) -> Parsed:
    """Everything before the first record that does not hold."""
    view = memoryview(data)
    blocks: list[Block] = []
    at = start = synced = 0
    while at + RECORD <= len(data):
        if data[at] == BLOCK:
            _, lines, length, crc = _HEADER.unpack_from(data, at)
            first, end = at + RECORD, at + (1 + lines) * RECORD
            if end > len(data):
                break
            check = zlib.crc32(view[first:end], zlib.crc32(view[at : at + _HEADER.size]))
            if check != _CRC.unpack_from(data, at + _HEADER.size)[0]:
                break
            blocks.append(Block(start, length, crc, first // RECORD, lines))
            start, at = start + length, end
        elif data[at] == MARK and (length := _marked(view[at : at + RECORD])) is not None:
            synced, at = max(synced, length), at + RECORD
        else:
            break
    return Parsed(blocks, at, max(synced, _later_mark(data, at)))


def lines_of(data: bytes, blocks: Sequence[Block]) -> np.ndarray:
    """Records of all lines of these blocks, as an array of LINES."""
    rows = np.frombuffer(data, LINES, len(data) // RECORD)
    parts = [rows[block.first : block.first + block.lines] for block in blocks]
    return np.concatenate(parts) if parts else rows[:0]


def good_blocks(blocks: Sequence[Block], chunks: Iterator[bytes]) -> list[bool]:
    """Which blocks the output really holds; `chunks` are its bytes from the start."""
    buffer = bytearray()
    begin = 0  # offset of buffer[0] in the output
    result: list[bool] = []
    for block in blocks:
        while begin + len(buffer) < block.start + block.length:
            chunk = next(chunks, b"")
            if not chunk:
                return result + [False] * (len(blocks) - len(result))
            del buffer[: block.start - begin]
            begin = block.start
            buffer += chunk
        offset = block.start - begin
        with memoryview(buffer) as view:
            crc = zlib.crc32(view[offset : offset + block.length])
        result.append(crc == block.crc)
    return result


def _marked(record: memoryview) -> int | None:
    if zlib.crc32(record[: _MARK.size]) != _CRC.unpack_from(record, _MARK.size)[0]:
        return None
    return _MARK.unpack_from(record)[1]


def _later_mark(data: bytes, at: int) -> int:
    """The greatest length that a whole mark behind a broken record vouches for."""
    rows = len(data) // RECORD
    kinds = np.frombuffer(data, np.uint8)[: rows * RECORD : RECORD]
    view = memoryview(data)
    found = 0
    for row in np.flatnonzero(kinds[at // RECORD :] == MARK) + at // RECORD:
        length = _marked(view[row * RECORD : (row + 1) * RECORD])
        found = max(found, length or 0)
    return found
