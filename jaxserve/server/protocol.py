"""Typed messages between the server and its child processes, as frames on a local socket.

A frame is its length in four bytes, then one msgpack message with a tag that names its type.  What
does not fit the types is refused while it is decoded: nothing else can be said over the socket, and
no code travels.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxserve.metrics import StepRecord
from jaxserve.request import SamplingParams, TokenLogprobs

MAX_FRAME = 256 << 20  # bytes; a longer one is an error, not a message
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# Server to engine.


class Start(_Message):
    """Once: the settings, as TOML."""

    config: str


class Add(_Message):
    """One prompt with its n samples, which get the numbers from `number` on."""

    number: int
    prompt: bytes  # token ids, `pack_ids`
    sampling: SamplingParams
    priority: int
    salt: str


class Finish(_Message):
    """Ends requests; nothing more is said about them."""

    numbers: list[int]
    reason: str


# Engine to server.


class Note(_Message):
    """A line for people."""

    line: str


class Compiled(_Message):
    """So many programs were compiled so far, in a start that did not find them in the cache."""

    count: int


class Failed(_Message):
    """The engine cannot start."""

    error: str


class Program(msgspec.Struct, array_like=True, frozen=True):
    """A row of the program table."""

    name: str
    why: str
    compile_s: float
    run_s: float  # as warm-up measured it


class Ready(_Message):
    """The engine serves."""

    config: str  # resolved, as TOML
    vocab_size: int
    eos_ids: list[int]
    windows: tuple[int | None, ...]  # of the groups of layers
    slowest_step_s: float  # predicted time of the largest step; 0: not measured
    startup: dict[str, float]  # seconds of its parts
    programs: list[Program]


class Gauges(msgspec.Struct, array_like=True, frozen=True):
    """The engine now."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0  # blocks
    kv_blocks: int = 0
    kv_allocated: int = 0  # blocks that came into use since its start
    failed_steps: int = 0
    compiles: int = 0  # after warm-up; each is a fault


class Beat(_Message):
    """The loop goes round and has nothing to do."""

    gauges: Gauges


class Refused(_Message):
    """The engine did not take a prompt.  `full`: for want of a place in its queue."""

    number: int
    error: str
    full: bool


class Prefill(NamedTuple):
    """How a request came to its first token."""

    wait_s: float  # for a seat
    compute_s: float  # from then on
    steps: int


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a step brought for one request (`jaxserve.request.Output`)."""

    number: int
    tokens: tuple[int, ...]
    finish_reason: str | None = None
    num_cached: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    prefill: Prefill | None = None  # with the first tokens


class Stepped(_Message):
    """What a step brought, and its figures; both may be empty (with overlap, the first step)."""

    entries: list[Entry]
    records: list[StepRecord]
    gauges: Gauges


ToEngine = Start | Add | Finish
FromEngine = Note | Compiled | Failed | Ready | Beat | Refused | Stepped


# Server to text process, and back.


class Load(_Message):
    """Once: where the tokenizer is, and what requests may call the model."""

    path: str
    names: list[str]
    chat_max_tokens: int  # of a chat that names none
    text_max_tokens: int


class Parse(_Message):
    """The body of a request."""

    number: int
    kind: str  # chat | text | tokenize | detokenize
    body: bytes


class Loaded(_Message):
    pass


class Parsed(_Message):
    """A body that can be run: one entry of `prompts` (`pack_ids`) for each of its prompts."""

    number: int
    prompts: list[bytes]
    sampling: SamplingParams
    priority: int
    salt: str
    stream: bool
    include_usage: bool
    return_token_ids: bool


class Answered(_Message):
    """A body that needs no engine: the answer, as JSON."""

    number: int
    body: bytes


class Rejected(_Message):
    number: int
    code: str
    message: str
    param: str | None


ToText = Load | Parse
FromText = Loaded | Parsed | Answered | Rejected


class Codec[In, Out](NamedTuple):
    """Reads messages of one kind and writes those of another."""

    decode: msgspec.msgpack.Decoder[In]
    encode: msgspec.msgpack.Encoder

    def read(self, frames: Iterable[bytes]) -> list[In]:
        return [self.decode.decode(frame) for frame in frames]

    def write(self, message: Out) -> bytes:
        data = self.encode.encode(message)
        return _LENGTH.pack(len(data)) + data


def codec(incoming: Any) -> Codec[Any, Any]:
    """Reads messages of the union `incoming`."""
    return Codec(msgspec.msgpack.Decoder(incoming), msgspec.msgpack.Encoder())


class Framer:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every frame that is complete now.  Raises ValueError for a length beyond MAX_FRAME."""
        self._data += data
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME} are read")
            end = start + _LENGTH.size + length
            if end > len(self._data):
                break
            yield bytes(self._data[start + _LENGTH.size : end])
            start = end
        del self._data[:start]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32.  Raises OverflowError for a number that is no int32."""
    return np.array(ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()
