"""Parts of parameters: read alone they are what a whole read would give, in the order of chips."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from model_zoo import partition
from model_zoo.checkpoint import Checkpoint, Place, TensorInfo
from model_zoo.weights.fill import gather
from model_zoo.weights.order import Order
from model_zoo.weights.region import whole
from model_zoo.weights.safetensors import open_safetensors


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_safetensors_read_parts(tmp_path, dtype):
    array = np.arange(6 * 8).reshape(6, 8).astype(dtype)
    save_file({"a": array, "b": array[0]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    checkpoint = open_safetensors(tmp_path)
    assert checkpoint.read_part is not None
    for part in (
        (slice(1, 4), slice(0, 8)),
        (slice(0, 6), slice(3, 5)),
        (slice(5, 6), slice(7, 8)),
    ):
        found = checkpoint.read_part("a", part)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array[part])
    np.testing.assert_array_equal(checkpoint.read_part("b", (slice(2, 7),)), array[0, 2:7])


PLACES = {
    "q0": Place("p", (0, slice(0, 4))),
    "k0": Place("p", (0, slice(4, 6))),
    "t1": Place("p", (1,), transpose=True),
}
SHAPE = (2, 6, 5)
TENSORS = {
    "q0": np.arange(20.0).reshape(4, 5),
    "k0": 100 + np.arange(10.0).reshape(2, 5),
    "t1": 200 + np.arange(30.0).reshape(5, 6),
}


def checkpoint(read: list[tuple[str, int]], parts: bool) -> Checkpoint:
    """Counts the values that are read."""

    def take(name: str, part=...) -> np.ndarray:
        found = TENSORS[name][part]
        read.append((name, found.size))
        return found

    infos = {name: TensorInfo(a.shape, "float64", "float64") for name, a in TENSORS.items()}
    return Checkpoint("here", {}, infos, take, take if parts else None)


REGIONS = [
    (slice(0, 2), slice(0, 6), slice(0, 5)),
    (slice(0, 1), slice(3, 5), slice(0, 5)),
    (slice(0, 2), slice(2, 3), slice(1, 4)),
    (slice(1, 2), slice(0, 6), slice(4, 5)),
]


@pytest.mark.parametrize("region", REGIONS, ids=str)
@pytest.mark.parametrize("parts", [True, False])
def test_a_region_is_what_the_whole_has_there(region, parts):
    target = (SHAPE, np.dtype(np.float64))
    everything = gather(checkpoint([], parts), tuple(PLACES), PLACES, target)
    np.testing.assert_array_equal(everything[0], np.concatenate([TENSORS["q0"], TENSORS["k0"]]))
    np.testing.assert_array_equal(everything[1], TENSORS["t1"].T)
    read: list[tuple[str, int]] = []
    found = gather(checkpoint(read, parts), tuple(PLACES), PLACES, target, region)
    np.testing.assert_array_equal(found, everything[region])
    if parts:
        assert sum(size for _, size in read) == found.size  # nothing else is read


@pytest.mark.parametrize(
    ("sizes", "copies", "ways"),
    [((8, 4, 4), (1, 1, 1), 2), ((8, 4, 4), (1, 1, 1), 4), ((16, 4, 4), (1, 4, 4), 8)],
)
def test_shares_give_every_chip_its_part_of_each(sizes, copies, ways):
    """With copies: two kv heads of 2, four chips for each."""
    shares = partition.shares(sizes, copies, ways)
    starts = np.cumsum([0, *sizes])
    for chip, share in enumerate(shares):
        for part, piece in enumerate(share):
            width = sizes[part] * copies[part] // ways
            assert piece.stop - piece.start == width
            assert piece.start - starts[part] == chip // copies[part] * width
    param = np.arange(3 * sum(sizes)).reshape(3, sum(sizes))
    width = sum(size * count for size, count in zip(sizes, copies, strict=True)) // ways
    order = Order(1, width, tuple(map(tuple, shares)))
    applied = np.asarray(order.apply(param.astype(np.int32)))
    assert applied.shape == (3, width * ways)
    pieces = order.pieces(whole(applied.shape))
    np.testing.assert_array_equal(applied, np.concatenate([param[p] for p in pieces], axis=1))
    third = (slice(1, 2), slice(width, 2 * width))
    found = np.concatenate([param[p] for p in order.pieces(third)], axis=1)
    np.testing.assert_array_equal(found, applied[third])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "copies"),
    [(32, 8, 8, 1), (32, 8, 4, 1), (32, 8, 16, 2), (64, 8, 64, 8), (9, 3, 1, 1), (9, 3, 9, 3)],
)
def test_every_chip_has_whole_kv_heads(heads, kv_heads, tensor, copies):
    assert partition.kv_copies(heads, kv_heads, tensor) == copies
    assert kv_heads * copies % tensor == 0 and heads % (kv_heads * copies) == 0


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(32, 8, 3), (9, 3, 6), (8, 8, 16)])
def test_heads_that_cannot_be_shared_out_are_refused_with_what_can(heads, kv_heads, tensor):
    with pytest.raises(ValueError, match=f"mesh.tensor={tensor}") as caught:
        partition.kv_copies(heads, kv_heads, tensor)
    for choice in map(int, str(caught.value).split("one of ")[1].split(", ")):
        assert partition.kv_copies(heads, kv_heads, choice) >= 1
