"""B88: every tensor is loaded, tied or known to be redundant, or the load fails with names."""

import numpy as np
import pytest

from model_zoo import registry
from model_zoo.checkpoint import Checkpoint, Place, TensorInfo
from model_zoo.weights import load_module, open_checkpoint
from model_zoo.weights.account import account
from tests.models import weight_files as files
from tests.reference import tiny

TIED = files.CONFIG
UNTIED = TIED | {"tie_word_embeddings": False}
WEIGHTS = tiny.make_weights(UNTIED, seed=2)  # has a head of its own
EMBEDDING = WEIGHTS["model.embed_tokens.weight"]
HEAD = "lm_head.weight"


def load(folder, config, weights):
    return load_module(open_checkpoint(files.write_folder(folder, config, weights)), "float32")


def without(*names):
    return {name: array for name, array in WEIGHTS.items() if name not in names}


def test_b88_tied_without_head_loads(tmp_path):
    assert "head" not in files.params(load(tmp_path, TIED, without(HEAD)))


def test_b88_tied_with_an_equal_head_loads(tmp_path):
    found = files.params(load(tmp_path, TIED, WEIGHTS | {HEAD: EMBEDDING}))
    files.assert_same_params(found, files.expected_params(TIED, WEIGHTS))


@pytest.mark.parametrize("where", [(0, 0), (-1, -1)])
def test_b88_tied_with_another_head_is_refused(tmp_path, where):
    head = EMBEDDING.copy()
    head[where] += 1
    with pytest.raises(ValueError, match="tie_word_embeddings, but lm_head.weight differs"):
        load(tmp_path, TIED, WEIGHTS | {HEAD: head})


def test_b88_untied_without_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="1 missing tensors: lm_head.weight"):
        load(tmp_path, UNTIED, without(HEAD))


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_b88_any_missing_tensor_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=f"1 missing tensors: {name}"):
        load(tmp_path, UNTIED, without(name))


def test_b88_everything_wrong_is_listed_at_once(tmp_path):
    weights = without("model.norm.weight", "model.layers.1.mlp.up_proj.weight") | {
        "model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32),
        "model.layers.0.mlp.down_proj.weight": np.ones((96, 72), np.float32),
    }
    with pytest.raises(ValueError) as caught:
        load(tmp_path, UNTIED, weights)
    text = str(caught.value)
    assert "2 missing tensors: model.norm.weight, model.layers.1.mlp.up_proj.weight" in text
    assert "1 unexpected tensors: model.layers.0.self_attn.q_norm.weight" in text
    assert "model.layers.0.mlp.down_proj.weight is [96, 72], needs [72, 96]" in text


def test_derived_buffers_are_ignored(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    files.assert_same_params(
        files.params(load(tmp_path, UNTIED, WEIGHTS | extra)),
        files.expected_params(UNTIED, WEIGHTS),
    )


def test_biases_that_the_config_does_not_name_are_unexpected(tmp_path):
    config = tiny.CONFIGS["all_biases"]
    weights = tiny.make_weights(config, seed=4)
    with pytest.raises(ValueError, match="8 unexpected tensors"):
        load(tmp_path, config | {"attention_bias": False}, weights)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
def test_layers_that_the_config_does_not_count_are_listed(tmp_path, change):
    with pytest.raises(ValueError, match=r"(missing|unexpected) tensors: model\.layers\."):
        load(tmp_path, UNTIED | change, WEIGHTS)


def test_an_absurd_config_costs_nothing(tmp_path):
    with pytest.raises(
        ValueError, match="num_hidden_layers must be a whole number from 1 to 10000"
    ):
        load(tmp_path, UNTIED | {"num_hidden_layers": 10**12}, WEIGHTS)
    with pytest.raises(ValueError, match="wrong shapes: model.embed_tokens.weight"):
        load(tmp_path, UNTIED | {"vocab_size": 10**9}, WEIGHTS)


def test_a_family_that_leaves_part_of_a_parameter_empty_is_refused():
    infos = {"a": TensorInfo((2, 4), "float32", "float32")}
    checkpoint = Checkpoint("file", {}, infos, lambda name: np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match="p has 12 values, the checkpoint fills 8"):
        account(checkpoint, {"a": Place("p", (slice(0, 2),))}, {"p": (3, 4)})
    with pytest.raises(ValueError, match="q does not exist"):
        account(checkpoint, {"a": Place("q")}, {"p": (2, 4)})


def test_b90_float16_is_refused(tmp_path):
    checkpoint = open_checkpoint(files.write_folder(tmp_path, UNTIED, WEIGHTS))
    with pytest.raises(ValueError, match="'float16' cannot run; use one of float32, bfloat16"):
        load_module(checkpoint, "float16")


def test_b90_values_beyond_float16_survive(tmp_path):
    weights = WEIGHTS | {"model.norm.weight": np.full(72, 1e5, np.float32)}
    found = files.params(
        load_module(open_checkpoint(files.write_folder(tmp_path, UNTIED, weights)), "bfloat16")
    )
    assert np.isfinite(found["norm"].astype(np.float32)).all()


def test_unknown_families_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="model_type='gpt9'.*supported: llama, mistral"):
        load(tmp_path, UNTIED | {"model_type": "gpt9"}, WEIGHTS)
    assert all(registry.family(name).model_type == name for name in registry.known())


def test_a_sliding_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sliding_window=4096 is not supported"):
        load(tmp_path, UNTIED | {"sliding_window": 4096}, WEIGHTS)
