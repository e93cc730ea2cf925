"""Hugging Face folders: what they hold arrives, whatever is wrong with them is said by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model_zoo.weights import load_module, open_checkpoint
from tests.models import weight_files as files
from tests.reference import tiny

WEIGHTS = tiny.make_weights(files.CONFIG, seed=1)


@pytest.mark.parametrize(
    "name", ["gqa_9_3", "mha", "wide_heads", "untied", "all_biases", "mistral"]
)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_value_arrives_in_its_place(tmp_path, name, shards):
    config = tiny.CONFIGS[name]
    weights = tiny.make_weights(config, seed=3)
    folder = files.write_folder(tmp_path, config, weights, shards)
    module = load_module(open_checkpoint(folder), "float32")
    files.assert_same_params(files.params(module), files.expected_params(config, weights))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_rounded_once_to_the_asked_type(tmp_path, stored, dtype):
    weights = {name: array.astype(stored) for name, array in WEIGHTS.items()}
    folder = files.write_folder(tmp_path, files.CONFIG, weights)
    found = files.params(load_module(open_checkpoint(folder), dtype))
    target = getattr(ml_dtypes, dtype, dtype)
    expected = {name: array.astype(target) for name, array in weights.items()}
    assert {array.dtype for array in found.values()} == {np.dtype(target)}
    files.assert_same_params(found, files.expected_params(files.CONFIG, expected))


def test_the_shards_decide_not_other_files(tmp_path):
    folder = files.write_folder(tmp_path, files.CONFIG, WEIGHTS, shards=2)
    save_file({"stray": np.zeros(3, np.float32)}, folder / "consolidated.safetensors")
    assert set(open_checkpoint(folder).infos) == set(WEIGHTS)


def test_b88_missing_shard_is_named(tmp_path):
    folder = files.write_folder(tmp_path, files.CONFIG, WEIGHTS, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors, which is missing"):
        open_checkpoint(folder)


def test_index_and_shards_must_agree(tmp_path):
    folder = files.write_folder(tmp_path, files.CONFIG, WEIGHTS, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="1 tensors that no shard holds: model.layers.9.ghost"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = files.write_folder(tmp_path, files.CONFIG, WEIGHTS, shards=2)
    save_file(WEIGHTS, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match="is also in another shard"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", 7])
def test_an_index_never_leads_out_of_the_folder(tmp_path, name):
    folder = files.write_folder(tmp_path / "model", files.CONFIG, WEIGHTS)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no plain file name"):
        open_checkpoint(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = files.write_folder(tmp_path_factory.mktemp("cut"), files.CONFIG, WEIGHTS)
    return folder, (folder / "model.safetensors").read_bytes()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_named_wherever_it_ends(whole, cut):
    folder, content = whole
    (folder / "model.safetensors").write_bytes(content[: int(cut * len(content))])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged safetensors file"):
        open_checkpoint(folder)


def test_an_absurd_header_is_refused(tmp_path):
    folder = files.write_folder(tmp_path, files.CONFIG, WEIGHTS)
    header = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="damaged safetensors file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(tmp_path, file):
    (tmp_path / "config.json").write_text(json.dumps(files.CONFIG))
    (tmp_path / file).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ValueError, match=f"{file} is a pickle.*convert it to safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is a pickle"):
        open_checkpoint(tmp_path / file)


def test_files_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    files.write_folder(tmp_path, files.CONFIG, WEIGHTS)
    with pytest.raises(ValueError, match="give its folder"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path):
    folder = files.write_folder(tmp_path, files.CONFIG, WEIGHTS, shards=2)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="2 safetensors files but no model.safetensors.index.json"):
        open_checkpoint(folder)


def test_quantised_folders_and_types_are_refused_by_name(tmp_path):
    quantised = files.CONFIG | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(ValueError, match="quantised by awq"):
        open_checkpoint(files.write_folder(tmp_path / "awq", quantised, WEIGHTS))
    integers = WEIGHTS | {"model.norm.weight": np.ones(72, np.int8)}
    folder = files.write_folder(tmp_path / "int8", files.CONFIG, integers)
    with pytest.raises(ValueError, match=r"1 unreadable types: model\.norm\.weight is I8"):
        load_module(open_checkpoint(folder), "float32")
