"""The default model's file, against the readers of the gguf package."""

import time

import gguf
import numpy as np
import pytest

from jaxserve import sources
from model_zoo.weights import load_module, open_checkpoint
from tests.models import gguf_blocks as blocks
from tests.models.weight_files import gguf_name, params, permute


@pytest.fixture(scope="module")
def path():
    return sources.resolve(sources.DEFAULT)


@pytest.mark.slow
def test_every_tensor_equals_the_package_s(path):
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    checkpoint = open_checkpoint(path)
    assert {gguf_name(name) for name in checkpoint.infos} == set(stored)
    for name, array in checkpoint.tensors():
        tensor = stored[gguf_name(name)]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            array = permute(array, 9 if "q_proj" in name else 3)
        np.testing.assert_array_equal(array, expected, err_msg=name)


@pytest.mark.slow
def test_rows_equal_the_definition_of_their_type(path):
    reader = gguf.GGUFReader(path)
    for tensor in [t for t in reader.tensors if t.tensor_type.name in blocks.NAMES][::10]:
        rows = np.asarray(tensor.data[:3])
        found = gguf.dequantize(rows, tensor.tensor_type)
        np.testing.assert_allclose(found, blocks.values(tensor.tensor_type.name, rows), rtol=1e-5)


@pytest.mark.slow
def test_loads_in_seconds(path):
    start = time.perf_counter()
    module = load_module(open_checkpoint(path), "bfloat16")
    seconds = time.perf_counter() - start
    assert sum(array.size for array in params(module).values()) == 134_515_008
    assert seconds < 6, f"{seconds:.1f} s; 0.7 to 1 s on two idle cores"
