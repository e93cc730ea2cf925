"""Orbax: what was saved restores bit for bit, by name or straight into shardings."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from etils import epath

from model_zoo.weights import load_module, open_checkpoint
from model_zoo.weights.manifest import WEIGHTS, write_manifest
from model_zoo.weights.orbax import save_weights
from tests.models import weight_files as files
from tests.reference import tiny

CONFIG = files.CONFIG | {"tie_word_embeddings": False}
MODEL = tiny.make_weights(CONFIG, seed=9)
ROOT = Path(__file__).parents[2]


def save(folder, weights, dtype=None):
    """An Orbax folder of `weights`, as convert writes it."""
    source = open_checkpoint(files.write_folder(folder / "source", CONFIG, weights))
    target = folder / "orbax"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    write_manifest(target, save_weights(source, epath.Path(target) / WEIGHTS, dtype))
    return target


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("orbax"), MODEL)


def test_every_tensor_comes_back_under_its_name(saved):
    checkpoint = open_checkpoint(saved)
    found = dict(checkpoint.tensors())
    assert found.keys() == MODEL.keys()
    for name, array in MODEL.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restores_into_the_module_in_the_asked_type(saved, dtype):
    found = files.params(load_module(open_checkpoint(saved), dtype))
    target = getattr(ml_dtypes, dtype, dtype)
    cast = {name: array.astype(target) for name, array in MODEL.items()}
    assert {array.dtype for array in found.values()} == {np.dtype(target)}
    files.assert_same_params(found, files.expected_params(CONFIG, cast))


def test_types_may_differ_within_a_parameter(tmp_path):
    types = (np.float32, np.float16, ml_dtypes.bfloat16)
    mixed = {n: array.astype(types[i % 3]) for i, (n, array) in enumerate(MODEL.items())}
    checkpoint = open_checkpoint(save(tmp_path, mixed))
    for name, array in checkpoint.tensors():
        assert (
            array.dtype
            == mixed[name].dtype
            == np.dtype(getattr(ml_dtypes, array.dtype.name, array.dtype))
        )
        assert checkpoint.infos[name].dtype == array.dtype.name
        np.testing.assert_array_equal(array, mixed[name], err_msg=name)


def test_a_type_can_be_chosen_when_saving(tmp_path):
    for name, array in open_checkpoint(save(tmp_path, MODEL, "bfloat16")).tensors():
        np.testing.assert_array_equal(array, MODEL[name].astype(ml_dtypes.bfloat16))


def test_sharded_over_eight_devices():
    """In its own process, since the number of devices is fixed when jax starts."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.models.eight_devices"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"


def test_a_parameter_without_a_sharding_is_named(saved):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match="has no sharding"):
        load_module(open_checkpoint(saved), "float32", {"embed": one})


def damaged(saved, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", saved, copy], check=True)
    return copy


def test_b88_parameters_that_do_not_fit_the_config_are_named(saved, tmp_path):
    copy = damaged(saved, tmp_path)
    (copy / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 100}))
    with pytest.raises(ValueError, match=r"layers.down is \(2, 72, 96\), needs \(2, 72, 100\)"):
        open_checkpoint(copy)
    (copy / "config.json").write_text(json.dumps(CONFIG | {"attention_bias": True}))
    with pytest.raises(ValueError, match="layers.out_bias is None, needs"):
        open_checkpoint(copy)


@pytest.mark.parametrize("lost", ["_METADATA", "manifest.ocdbt", "d", "half of the data"])
def test_a_damaged_folder_is_named(saved, tmp_path, lost):
    """In its own process: Orbax leaves reads behind that complain when their loop has gone."""
    copy = damaged(saved, tmp_path)
    if lost == "half of the data":
        data = max((copy / WEIGHTS).rglob("d/*"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    else:
        subprocess.run(["rm", "-r", copy / WEIGHTS / lost], check=True)
    ran = subprocess.run(
        [sys.executable, "-c", TRY_TO_LOAD, copy],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.count("is no whole Orbax checkpoint") == 2, ran.stdout + ran.stderr
    assert ran.stdout.count("convert the model again") == 2


TRY_TO_LOAD = """
import sys
from pathlib import Path
from model_zoo.weights import load_module, open_checkpoint
for use in (lambda c: load_module(c, "float32"), lambda c: list(c.tensors())):
    try:
        use(open_checkpoint(Path(sys.argv[1])))
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 99}', "has format 99, this version reads 1"),
        ('{"format": 1, "weights": 3, "dtypes": {}}', "is damaged"),
        ('{"format": 1, "weights": "../../x", "dtypes": {}}', "names the weights"),
        ("{", "not valid JSON"),
    ],
)
def test_a_damaged_manifest_is_named(saved, tmp_path, content, message):
    copy = damaged(saved, tmp_path)
    (copy / "jaxserve.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(copy)
