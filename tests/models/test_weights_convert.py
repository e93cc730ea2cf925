"""A round trip through any formats changes no bit; a destination is whole or not there."""

import json
import shutil
import types

import etils
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file

from jaxserve.convert import FORMATS, convert
from jaxserve.sources import files_of, resolve
from jaxserve.text.tokenizer import load_tokenizer
from model_zoo.checkpoint import TensorInfo
from model_zoo.weights import load_module, open_checkpoint, orbax, save
from model_zoo.weights.safetensors import write_safetensors
from tests.models import gguf_blocks as blocks
from tests.models import weight_files as files
from tests.reference import tiny

CONFIG = files.BIG | {"tie_word_embeddings": False, "rope_scaling": None}
TYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
MODEL = {
    name: array.astype(TYPES[i % 3])
    for i, (name, array) in enumerate(tiny.make_weights(CONFIG, seed=1).items())
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same model in every format that can be read, and a quantised one."""
    folder = tmp_path_factory.mktemp("sources")
    metadata = files.tokenizer_metadata()
    gguf = files.write_gguf(folder / "m.gguf", CONFIG, MODEL, metadata=metadata)
    found = {"gguf": gguf}
    for form in FORMATS:
        convert(gguf, str(folder / form), form)
        found[form] = folder / form
    rows = {
        name: blocks.random_blocks("Q4_K", array.shape, 3) if array.ndim == 2 else array
        for name, array in MODEL.items()
    }
    kind = blocks.Kind.Q4_K
    found["q4_k"] = files.write_gguf(folder / "q.gguf", CONFIG, rows, kind, metadata=metadata)
    return found


def contents(path):
    return {name: (a.dtype, a.tobytes()) for name, a in open_checkpoint(path).tensors()}


@pytest.mark.parametrize("source", ["gguf", "safetensors", "orbax", "q4_k"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("back", FORMATS)
def test_round_trips_are_bit_exact(tmp_path, sources, source, form, back):
    convert(sources[source], str(tmp_path / "there"), form)
    convert(tmp_path / "there", str(tmp_path / "back"), back)
    expected = contents(sources[source])
    assert contents(tmp_path / "there") == expected
    assert contents(tmp_path / "back") == expected
    for dtype in ("float32", "bfloat16"):
        before, after = (
            files.params(load_module(open_checkpoint(path), dtype))
            for path in (sources[source], tmp_path / "back")
        )
        files.assert_same_params(before, after)


def test_the_model_is_what_it_was_made_of(sources):
    expected = {name: (array.dtype, array.tobytes()) for name, array in MODEL.items()}
    for source in ("gguf", *FORMATS):
        assert contents(sources[source]) == expected


@pytest.mark.parametrize("source", ["gguf", *FORMATS])
def test_the_files_of_a_model_are_all_that_it_is_loaded_from(tmp_path, sources, source):
    """Whatever else lies in its folder."""
    if sources[source].is_file():
        assert files_of(sources[source]) == [sources[source]]
        return
    whole = shutil.copytree(sources[source], tmp_path / "whole")
    for name in ("out.jsonl", "out.jsonl.journal/records-00001", "other/model.safetensors"):
        (whole / name).parent.mkdir(exist_ok=True)
        (whole / name).write_bytes(b"x")
    for file in files_of(whole):
        copy = tmp_path / "copy" / file.relative_to(whole)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    names = {file.name for file in (tmp_path / "copy").iterdir()}
    assert names == {file.name for file in sources[source].iterdir()}
    assert contents(tmp_path / "copy") == contents(sources[source])
    tokenizers = [load_tokenizer(path) for path in (tmp_path / "copy", sources[source])]
    assert len({(tuple(t.encode("A text.")), t.eos_ids, t.chat_template) for t in tokenizers}) == 1


def test_other_libraries_read_the_safetensors(sources):
    found = load_file(sources["safetensors"] / "model.safetensors")
    assert found.keys() == MODEL.keys()
    for name, array in MODEL.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("length", range(1, 9))
def test_the_data_of_a_safetensors_file_is_aligned(tmp_path, length):
    path, name = tmp_path / "x.safetensors", "n" * length
    array = np.arange(3, dtype=np.float32)
    write_safetensors(path, {name: TensorInfo((3,), "float32", "float32")}, [(name, array)])
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    np.testing.assert_array_equal(load_file(path)[name], array)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_casts_every_tensor(tmp_path, sources, form, dtype):
    convert(sources["gguf"], str(tmp_path / "cast"), form, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path / "cast")
    assert checkpoint.hf_config["torch_dtype"] == dtype
    for name, array in checkpoint.tensors():
        expected = MODEL[name].astype(getattr(ml_dtypes, dtype, dtype))
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected, err_msg=name)


@pytest.mark.parametrize("form", FORMATS)
def test_config_and_tokenizer_come_along(tmp_path, sources, form):
    convert(sources[form], str(tmp_path / "again"), form)
    before, after = load_tokenizer(sources["gguf"]), load_tokenizer(tmp_path / "again")
    for text in ("abc <s>", " x ~"):
        assert after.encode(text) == before.encode(text)
    assert after.eos_ids == before.eos_ids == {2}
    assert after.chat_template == before.chat_template
    found = open_checkpoint(tmp_path / "again").hf_config
    for key in CONFIG.keys() - {"rope_scaling"}:
        assert found[key] == CONFIG[key], key


def test_a_copy_of_the_embedding_is_left_out_and_another_head_refused(tmp_path):
    tied = CONFIG | {"tie_word_embeddings": True}
    embedding = MODEL["model.embed_tokens.weight"]
    folder = files.write_folder(tmp_path / "in", tied, MODEL | {"lm_head.weight": embedding})
    for form in FORMATS:
        convert(folder, str(tmp_path / form), form)
        assert "lm_head.weight" not in open_checkpoint(tmp_path / form).infos
    files.write_folder(tmp_path / "in", tied, MODEL)
    for form in FORMATS:
        with pytest.raises(ValueError, match="lm_head.weight differs"):
            convert(folder, str(tmp_path / "new"), form)


def test_code_and_strangers_in_the_folder_stay_behind(tmp_path, sources):
    folder = files.write_folder(tmp_path / "in", CONFIG, MODEL)
    for name in ("modeling_evil.py", "notes.txt", "pytorch_model.bin"):
        (folder / name).write_text("x")
    convert(folder, str(tmp_path / "out"), "safetensors")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_an_existing_model_is_replaced_only_with_force(tmp_path, sources, form):
    out = tmp_path / "out"
    convert(sources["gguf"], str(out), "safetensors")
    (out / "old").write_text("")
    with pytest.raises(ValueError, match="exists; choose another name or add --force"):
        convert(sources["gguf"], str(out), form)
    assert (out / "old").exists()
    convert(sources["gguf"], str(out), form, force=True)
    assert not (out / "old").exists()
    assert contents(out) == contents(sources["gguf"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_can_be_replaced_by_itself(tmp_path, sources):
    folder = files.write_folder(tmp_path / "m", CONFIG, MODEL)
    convert(folder, str(folder), "orbax", force=True)
    assert contents(folder) == contents(sources["gguf"])


def test_force_never_removes_what_is_no_model(tmp_path, sources):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("home", "file"):
        with pytest.raises(ValueError, match="is no model folder; choose another name"):
            convert(sources["gguf"], str(tmp_path / name), "safetensors", force=True)
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_an_empty_folder_is_taken(tmp_path, sources):
    (tmp_path / "empty").mkdir()
    convert(sources["gguf"], str(tmp_path / "empty"), "safetensors")
    assert contents(tmp_path / "empty") == contents(sources["gguf"])


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_everything_as_it_was(tmp_path, sources, monkeypatch, existing):
    out = tmp_path / "out"
    if existing:
        convert(sources["gguf"], str(out), "orbax")

    def fail(checkpoint, path, dtype):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(save, "save_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(sources["gguf"], str(out), "safetensors", force=True)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])
    if existing:
        assert contents(out) == contents(sources["gguf"])


def test_an_address_takes_orbax_only(tmp_path, sources):
    with pytest.raises(ValueError, match="only --format orbax"):
        convert(sources["gguf"], "gs://bucket/model", "safetensors")


@pytest.fixture
def store(monkeypatch):
    """A store whose objects are local files: fake:///a/b lies at /a/b."""

    def path(address):
        return epath.Path(str(address).removeprefix("fake://"))

    fake = types.SimpleNamespace(Path=path)
    monkeypatch.setattr(etils, "epath", fake)
    monkeypatch.setattr(orbax, "epath", fake)


@pytest.mark.usefixtures("store")
def test_an_address_gets_the_same_files_as_a_folder(tmp_path, sources):
    address = f"fake://{tmp_path}/model"
    convert(sources["gguf"], address, "orbax")
    assert contents(tmp_path / "model") == contents(sources["gguf"])
    expected = sorted(path.name for path in sources["orbax"].iterdir())
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == expected
    with pytest.raises(ValueError, match=f"{address} exists; choose another"):
        convert(sources["gguf"], address, "orbax")


@pytest.mark.usefixtures("store")
def test_a_model_at_an_address_is_used_where_it_is(tmp_path, sources):
    address = f"fake://{tmp_path}/model"
    convert(sources["gguf"], address, "orbax")
    local = resolve(f"{address}/", cache_dir=tmp_path / "cache")
    assert local.is_relative_to(tmp_path / "cache")
    assert not (local / "weights").exists()
    assert contents(local) == contents(sources["gguf"])
    assert load_tokenizer(local).encode("abc") == load_tokenizer(sources["gguf"]).encode("abc")
    before, after = (
        files.params(load_module(open_checkpoint(path), "bfloat16"))
        for path in (sources["gguf"], local)
    )
    files.assert_same_params(before, after)
    (tmp_path / "model" / "generation_config.json").unlink()
    assert resolve(address, cache_dir=tmp_path / "cache") == local
    assert not (local / "generation_config.json").exists()


@pytest.mark.usefixtures("store")
def test_an_address_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"jaxserve\.json is missing"):
        resolve(f"fake://{tmp_path}/nothing", cache_dir=tmp_path)


def test_an_address_that_nothing_can_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot read nonsense://x"):
        resolve("nonsense://x", cache_dir=tmp_path)


def test_the_config_keeps_what_it_says_beside_the_sizes(tmp_path):
    odd = CONFIG | {"dtype": "float16", "anything": {"else": [1, None]}}
    folder = files.write_folder(tmp_path / "in", odd, MODEL)
    convert(folder, str(tmp_path / "out"), "safetensors", dtype="bfloat16")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found == odd | {"dtype": "bfloat16"}
