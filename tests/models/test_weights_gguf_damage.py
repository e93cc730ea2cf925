"""A damaged GGUF file costs a ValueError that names it, and nothing else."""

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_zoo.gguf_header import read_gguf
from model_zoo.weights import open_checkpoint
from tests.models import weight_files as files
from tests.reference import tiny

HUGE = 2**62


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "model.gguf"
    metadata = {"general.name": "tiny", "tokenizer.ggml.eos_token_id": 2}
    weights = tiny.make_weights(files.CONFIG, seed=1)
    content = files.write_gguf(path, files.CONFIG, weights, metadata=metadata).read_bytes()
    header = content.index(b"output_norm") + 64  # within the last entries of the tensor table
    return path, content, header


def read_damaged(path, content):
    path.write_bytes(content)
    return open_checkpoint(path)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_truncation_anywhere_is_named(whole, cut):
    path, content, _ = whole
    with pytest.raises(ValueError, match=r"model\.gguf"):
        read_damaged(path, content[: int(cut * len(content))])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(1, 255))
def test_a_changed_byte_of_the_header_opens_or_is_named(whole, at, byte):
    path, content, header = whole
    damaged = bytearray(content)
    damaged[int(at * header)] ^= byte
    tracemalloc.start()
    try:
        checkpoint = read_damaged(path, bytes(damaged))
    except ValueError as error:
        assert "model.gguf" in str(error)
    else:
        assert checkpoint.infos
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(content) + 2**20


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "has 0 bytes"),
        (b"GGU", "has 3 bytes"),
        (b"PK\x03\x04" + b"\0" * 64, "it begins with b'PK"),
        (b"GGUF" + struct.pack("<I", 1), "version 1; supported"),
        (b"GGUF" + struct.pack(">I", 3), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensor name at byte 24 runs past the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata key at byte 24 runs past the end"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE), "metadata key at byte 32 runs past"),
    ],
)
def test_absurd_headers_are_named(tmp_path, start, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    with pytest.raises(ValueError, match=message):
        read_gguf(path)


def header(*fields, tensors=0, keys=0):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(fields)


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"t", shape=(4,), kind=0, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(text(b"k"), struct.pack("<I", 77), keys=1), "unknown value type 77"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 8, HUGE), keys=1), "claims .* strings"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 4, HUGE), keys=1), "runs past the end"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 9, 1), keys=1), "array of the unknown"),
        (header(text(b"\xff"), struct.pack("<I", 0), keys=1), "not UTF-8"),
        (header(*[text(b"k") + struct.pack("<IB", 0, 1)] * 2, keys=2), "'k' appears twice"),
        (header(tensor(), tensor(), tensors=2), "'t' appears twice"),
        (header(tensor(shape=(2,) * 5), tensors=1), "has 5 dimensions"),
        (header(tensor(shape=(HUGE, HUGE)), tensors=1), "ends at byte .*truncated"),
        (header(tensor(offset=HUGE), tensors=1), "ends at byte .*truncated"),
        (header(tensor(shape=(0,)), tensors=1), "impossible shape"),
        (header(tensor(shape=(33,), kind=2), tensors=1), "Q4_0 has the impossible shape"),
        (header(tensor(kind=250), tensors=1), "unknown type 250"),
        (
            header(text(b"general.alignment"), struct.pack("<II", 4, 3), keys=1),
            "general.alignment is 3",
        ),
    ],
)
def test_damaged_tables_are_named(tmp_path, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf(path)
    assert "model.gguf" in str(caught.value)
