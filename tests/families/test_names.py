"""Names of every family, in both formats: every element of every parameter has one place."""

import dataclasses

import numpy as np
import pytest

from model_zoo import registry
from model_zoo.parameters import axes, joined, shapes
from model_zoo.weights import load_module, open_checkpoint
from tests.families import gguf_files
from tests.families.cases import NAMES, case
from tests.models.weight_files import params


def configured(name: str):
    return registry.configure(open_checkpoint(case(name).folder), "float32", max_len=136)


def test_every_family_has_a_committed_checkpoint() -> None:
    assert {case(name).config["model_type"] for name in NAMES} == set(registry.known())


@pytest.mark.parametrize("name", NAMES)
def test_b88_every_element_of_every_parameter_has_exactly_one_place(name: str) -> None:
    family, config = configured(name)
    filled = {path: np.zeros(shape, int) for path, shape in shapes(config).items()}
    for place in family.places(config).values():
        filled[place.path][place.index or ...] += 1
    assert all((count == 1).all() for count in filled.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_logical_axes(name: str) -> None:
    """What tensor parallelism splits is named alike everywhere, and its parts add up."""
    _, config = configured(name)
    parts = joined(config)
    sizes = {
        **{"layers": config.L, "embed": config.D, "vocab": config.V, "mlp": config.F},
        **{"heads": config.N * config.H, "kv_heads": config.K * config.H, "head_dim": config.H},
        **{axis: sum(part) for axis, part in parts.items()},
        "experts": config.moe.experts if config.moe else 0,
    }
    declared = axes(config)
    assert declared.keys() == shapes(config).keys()
    for path, shape in shapes(config).items():
        assert tuple(sizes[axis] for axis in declared[path]) == shape, path


@pytest.mark.parametrize("name", gguf_files.ARCHITECTURES)
def test_b89_gguf_gives_the_same_model_as_safetensors(tmp_path, name: str) -> None:
    """Names, row order, norms without their offset, experts apart; and the whole config."""
    folder = open_checkpoint(case(name).folder)
    file = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", name, folder))
    assert set(file.infos) == set(folder.infos)
    assert set(file.infos) == set(configured(name)[0].places(configured(name)[1]))
    for tensor, array in folder.tensors():
        expected = array.astype(np.float32)
        np.testing.assert_allclose(file.read(tensor), expected, rtol=0, atol=1e-6, err_msg=tensor)
    ours = registry.configure(file, "float32", max_len=136)[1]
    theirs = configured(name)[1]
    for field in dataclasses.fields(theirs):
        found, expected = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "attention_scale" and name.startswith("gemma"):
            continue  # not in the file: llama.cpp knows it by the size of the model
        if field.name == "ropes":
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one.frequencies, other.frequencies, rtol=1e-6)
                assert abs(one.scale - other.scale) < 1e-6
        elif isinstance(expected, float):
            assert abs(found - expected) < 1e-6, field.name
        else:
            assert found == expected, field.name


def test_the_loaded_module_declares_its_axes() -> None:
    module = load_module(open_checkpoint(case("qwen3").folder), "float32")
    assert module.layers.qkv.get_metadata()["axes"] == ("layers", "qkv", "embed")
    assert params(module).keys() == axes(module.config).keys()
