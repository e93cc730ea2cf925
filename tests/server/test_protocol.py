"""Messages between processes: what goes in comes out, and nothing else gets through."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import SamplingParams, TokenLogprobs
from jaxserve.server import protocol
from jaxserve.server.protocol import (
    Add,
    Entry,
    Finish,
    Framer,
    FromEngine,
    Gauges,
    Stepped,
    ToEngine,
)

TO_ENGINE = protocol.codec(ToEngine)
FROM_ENGINE = protocol.codec(FromEngine)
SAMPLING = SamplingParams(
    max_tokens=5, stop=("a", "é"), logit_bias={3: -1.5}, seed=2**64 - 1, logprobs=2, n=3
)


@settings(derandomize=True, max_examples=50)
@given(
    ids=st.lists(st.lists(st.integers(0, 2**31 - 1)), max_size=4),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_what_is_sent_arrives_however_it_is_cut(ids: list[list[int]], cuts: list[int]):
    sent = [Add(i, protocol.pack_ids(x), SAMPLING, -3, "salt") for i, x in enumerate(ids)]
    data = b"".join(TO_ENGINE.write(message) for message in sent)
    framer, got = Framer(), []
    place = 0
    while place < len(data):
        cut = cuts[place % len(cuts)]
        got += TO_ENGINE.read(framer.feed(data[place : place + cut]))
        place += cut
    assert got == sent
    assert [protocol.unpack_ids(message.prompt) for message in got] == ids


def test_a_step_with_logprobs_arrives():
    logprobs = (TokenLogprobs(3, -0.5, 1, ((3, -0.5), (4, float("-inf")))),)
    message = Stepped(
        [Entry(7, (3,), "stop", 16, None, logprobs, (None, *logprobs))], [], Gauges(1, 2, 3, 4)
    )
    (got,) = FROM_ENGINE.read(Framer().feed(FROM_ENGINE.write(message)))
    assert got == message
    assert isinstance(got.entries[0].logprobs[0], TokenLogprobs)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04cos\nsystem\n(S'id'\ntR.",  # a pickle
        msgspec.msgpack.encode(["Unknown", 1]),
        msgspec.msgpack.encode(["Finish", "not numbers", "abort"]),
        msgspec.msgpack.encode({"anything": 1}),
        msgspec.msgpack.encode(["Add", 1, b"", {"max_tokens": -1}, 0, ""]),
    ],
)
def test_cve_2025_32444_nothing_but_typed_messages_gets_through(data: bytes):
    with pytest.raises(msgspec.DecodeError):
        TO_ENGINE.read([data])
    (good,) = TO_ENGINE.read(Framer().feed(TO_ENGINE.write(Finish([1], "abort"))))
    assert good == Finish([1], "abort")


def test_a_length_that_nobody_sends_is_refused():
    with pytest.raises(ValueError, match="frame"):
        list(Framer().feed(b"\xff\xff\xff\xff"))
