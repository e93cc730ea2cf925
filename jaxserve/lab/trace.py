"""The step-shape trace of a run (`--record FILE`): what every step and request did, compactly.

gzip over JSON lines.  The first line is a `Header`, which names the entries of the arrays that
follow: `["s", ...]` a step, `["r", ...]` a request, written when it ended.  Times are whole
microseconds, those of events since the start of the trace.  A trace whose writer was killed is
read up to the last flush.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.costs import CostModel
from jaxserve.kv.groups import FULL, Windows

FORMAT = 1
FLUSH_EVERY = 256  # steps that a killed process may lose
_LEVEL = 6


class TraceError(ValueError):
    """A file that is no trace; the message names it."""


class Step(msgspec.Struct, array_like=True, tag="s", frozen=True):
    """One step that has returned."""

    at: int  # as it was planned
    landed: int  # after that, as its result was at the host
    device: int
    padding: int  # part of `device`, by the cost table
    phases: tuple[int, int, int, int, int]  # schedule, build, dispatch, wait, update
    predicted: int | None  # device time by the cost table
    bucket: int
    decodes: int
    context: int  # KV entries that the decodes read, in all
    chunks: tuple[tuple[int, int, int], ...]  # request, start, tokens
    last_chunk: int  # tokens of the chunk that snapping may cut, before it did; 0: none
    cut: int  # tokens that snapping took from it
    sampled: int  # rows
    sampler: str
    output: int
    dropped: int
    recomputed: int
    unused: str | None
    waiting: int
    running: int
    kv_used: int  # blocks
    kv_live: int  # blocks of the requests that have tokens in this step or wait for their next
    preempted: tuple[int, ...]  # requests
    admitted: tuple[int, ...]
    hit: int  # prompt tokens found in the prefix cache
    late: int  # tokens of requests that had ended before the step was planned

    @property
    def prefill(self) -> int:
        """Tokens of chunks."""
        return sum(chunk[2] for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill

    @property
    def kind(self) -> str:
        if not self.decodes:
            return "prefill"
        return "mixed" if self.chunks else "decode"


class RequestRow(msgspec.Struct, array_like=True, tag="r", frozen=True):
    """One sample of one request."""

    number: int
    sample: int
    arrived: int
    ended: int | None  # None: it had not when the trace was closed
    prompt: int
    output: int
    cached: int  # prompt tokens found in the prefix cache
    # Prompt tokens computed although another request had computed or was computing the same prefix:
    # at the same time; before, but evicted; before, but the hit was rounded down to whole chunks.
    missed: tuple[int, int, int]
    computed: int  # tokens of its chunks, those after a preemption included
    num_preempted: int
    reason: str | None
    runs: tuple[tuple[int, int], ...]  # output tokens: step, and how many steps brought one each


class Header(msgspec.Struct, frozen=True):
    jaxserve_trace: int
    version: str
    config: str  # TOML, resolved
    device: str
    costs: CostModel | None  # once measured
    programs: list[dict[str, Any]]  # `Manifest.table`
    facts: dict[str, Any]
    step: tuple[str, ...] = Step.__struct_fields__
    request: tuple[str, ...] = RequestRow.__struct_fields__


class Trace(msgspec.Struct, frozen=True):
    header: Header
    steps: list[Step]
    requests: list[RequestRow]

    @property
    def windows(self) -> Windows:
        """Of the model's groups of layers."""
        return tuple(self.header.facts.get("windows", FULL))


class Writer:
    """Writes a trace; OSError as files do."""

    def __init__(self, path: Path, header: Header) -> None:
        self._file = gzip.open(path, "wb", compresslevel=_LEVEL)
        self._encode = msgspec.json.Encoder().encode
        self._steps = 0
        self._file.write(self._encode(header) + b"\n")

    def write(self, row: Step | RequestRow) -> None:
        self._file.write(self._encode(row) + b"\n")
        if isinstance(row, Step):
            self._steps += 1
            if self._steps % FLUSH_EVERY == 0:
                self._file.flush()

    def close(self) -> None:
        self._file.close()


def load(path: Path) -> Trace:
    """Raises TraceError for a file that cannot be read or is no trace."""
    lines = _lines(path)
    try:
        header = msgspec.json.decode(next(lines, b""), type=Header)
        if header.jaxserve_trace != FORMAT:
            raise TraceError(f"{path}: a trace of format {header.jaxserve_trace}, not {FORMAT}")
        decode = msgspec.json.Decoder(Step | RequestRow).decode
        rows = [decode(line) for line in lines]
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}: not a trace that --record wrote: {error}") from error
    steps = [row for row in rows if isinstance(row, Step)]
    requests = [row for row in rows if isinstance(row, RequestRow)]
    return Trace(header, steps, sorted(requests, key=lambda row: row.number))


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines only."""
    with gzip.open(path, "rb") as file:
        while True:
            try:
                line = file.readline()
            except (EOFError, zlib.error):
                return
            if not line.endswith(b"\n"):
                return
            yield line
