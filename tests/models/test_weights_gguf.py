"""GGUF: names, row order, block types, rope and config arrive as in the same model's HF folder."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from model_zoo import rope
from model_zoo.weights import load_module, open_checkpoint
from model_zoo.weights.gguf import dequantise
from model_zoo.weights.gguf_config import llama3_factors
from tests.models import gguf_blocks as blocks
from tests.models import weight_files as files
from tests.reference import tiny

CONFIG = files.CONFIG  # 9 query heads, 3 kv heads
WEIGHTS = tiny.make_weights(CONFIG, seed=5)
UNTIED = CONFIG | {"tie_word_embeddings": False}
LLAMA3 = tiny.CONFIGS["rope_llama3"]["rope_scaling"] | {"original_max_position_embeddings": 8192}


def params_of(path, dtype="float32"):
    return files.params(load_module(open_checkpoint(path), dtype))


@pytest.mark.parametrize(
    "name", ["gqa_9_3", "mqa", "wide_heads", "untied", "all_biases", "attention_bias"]
)
def test_b89_gguf_loads_the_same_parameters_as_safetensors(tmp_path, name):
    config = {"head_dim": 8, "num_key_value_heads": 4} | tiny.CONFIGS[name]
    weights = tiny.make_weights(config, seed=6)
    folder = files.write_folder(tmp_path / "hf", config, weights)
    file = files.write_gguf(tmp_path / "model.gguf", config, weights)
    files.assert_same_params(params_of(file), params_of(folder))


def test_b89_forgetting_the_row_order_would_be_seen(tmp_path):
    file = files.write_gguf(tmp_path / "model.gguf", CONFIG, WEIGHTS)
    checkpoint = open_checkpoint(file)
    for name in ("q_proj", "k_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        heads = 9 if "q_proj" in name else 3
        assert not np.array_equal(files.permute(WEIGHTS[name], heads), WEIGHTS[name])
        np.testing.assert_array_equal(checkpoint.read(name), WEIGHTS[name])


def test_config_equals_the_folder_s(tmp_path):
    for config in (CONFIG, UNTIED, tiny.CONFIGS["all_biases"]):
        weights = tiny.make_weights(config, seed=6)
        found = open_checkpoint(files.write_gguf(tmp_path / "m.gguf", config, weights)).hf_config
        for key in config.keys() - {
            "architectures",
            "rope_scaling",
            "bos_token_id",
            "eos_token_id",
        }:
            assert found[key] == config[key], key


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_plain_types_are_exact(tmp_path, stored):
    weights = {name: array.astype(stored) for name, array in WEIGHTS.items()}
    checkpoint = open_checkpoint(files.write_gguf(tmp_path / "m.gguf", CONFIG, weights))
    assert {info.dtype for info in checkpoint.infos.values()} == {np.dtype(stored).name}
    for name, array in checkpoint.tensors():
        assert array.dtype == stored
        np.testing.assert_array_equal(array, weights[name], err_msg=name)


@pytest.mark.parametrize("name", blocks.NAMES)
def test_block_types_equal_the_definition(name):
    rows = blocks.random_blocks(name, (5, 768), seed=7)
    found = dequantise(rows.reshape(-1), blocks.Kind[name]).reshape(5, 768)
    np.testing.assert_allclose(found, blocks.values(name, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", blocks.NAMES)
def test_block_types_do_not_depend_on_how_they_are_grouped(name):
    rows = blocks.random_blocks(name, (3, 32_768), seed=8)  # several groups, the last one partial
    whole = dequantise(rows[:, : rows.shape[1] * 5 // 8].reshape(-1), blocks.Kind[name])
    parts = [dequantise(row[: rows.shape[1] * 5 // 8], blocks.Kind[name]) for row in rows]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("name", blocks.NAMES)
def test_quantised_models_load(tmp_path, name):
    config = files.BIG
    stored, expected = {}, {}
    for seed, (tensor, shape) in enumerate(tiny.tensor_shapes(config).items()):
        if len(shape) == 1:
            stored[tensor] = expected[tensor] = np.full(shape, 0.5 + seed, np.float32)
            continue
        stored[tensor] = blocks.random_blocks(name, shape, seed)
        expected[tensor] = dequantise(stored[tensor].reshape(-1), blocks.Kind[name]).reshape(shape)
    file = files.write_gguf(tmp_path / "m.gguf", config, stored, blocks.Kind[name])
    checkpoint = open_checkpoint(file)
    assert {info.stored for info in checkpoint.infos.values()} == {name, "float32"}
    assert {info.dtype for info in checkpoint.infos.values()} == {"float32"}
    files.assert_same_params(params_of(file), files.expected_params(config, expected))


def test_other_types_are_refused_by_name(tmp_path):
    rows = np.zeros((64, 84), np.uint8)
    weights = tiny.make_weights(files.BIG, seed=1) | {"model.embed_tokens.weight": rows}
    file = files.write_gguf(tmp_path / "m.gguf", files.BIG, weights, blocks.Kind.Q2_K)
    with pytest.raises(
        ValueError, match="token_embd.weight has the type Q2_K; supported types: F32"
    ):
        open_checkpoint(file)


def test_b89_unknown_tensors_are_listed(tmp_path):
    extra = {
        "blk.0.attn_q_norm.weight": np.ones(8, np.float32),
        "blk.0.ffn_gate_exps.weight": np.ones((2, 2), np.float32),
    }
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra=extra)
    with pytest.raises(
        ValueError, match="2 tensors.*blk.0.attn_q_norm.weight, blk.0.ffn_gate_exps"
    ):
        open_checkpoint(file)


def test_q_rows_that_do_not_fit_the_heads_are_refused(tmp_path):
    wrong = WEIGHTS | {"model.layers.0.self_attn.k_proj.weight": np.ones((72, 72), np.float32)}
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, wrong)
    with pytest.raises(ValueError, match=r"k_proj.weight is \[72, 72\], needs \[24, 72\]"):
        load_module(open_checkpoint(file), "float32")
    with pytest.raises(ValueError, match="attn_k.weight has 72 rows, but 3 heads of 8 need 24"):
        open_checkpoint(file).read("model.layers.0.self_attn.k_proj.weight")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.sliding_window": 4096}, "sliding window of 4096"),
        ({"split.count": 2}, "one part of a split GGUF"),
        ({"llama.rope.dimension_count": 4}, "rotated 4"),
        ({"llama.attention.head_count": "nine"}, "head_count is 'nine', not one positive number"),
        ({"llama.rope.scaling.type": "spiral"}, "rope scaling 'spiral' is unknown"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope needs the tensors"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn rope scaling without a factor"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, monkeypatch, metadata, message):
    clash = {key: None for key in metadata}  # ours replaces the writer's own
    add = gguf.GGUFWriter.add_key_value
    seen = set()

    def add_once(self, key, value, kind, *more):
        if key in clash and (key in seen or value != metadata[key]):
            return
        seen.add(key)
        add(self, key, value, kind, *more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", add_once)
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(file)


def test_other_architectures_are_refused(tmp_path):
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, architecture="mamba")
    with pytest.raises(ValueError, match="general.architecture is 'mamba', supported: llama, "):
        open_checkpoint(file)


def frequencies(config):
    return np.array(rope.from_hf(config, head_dim=config["head_dim"]).frequencies)


@pytest.mark.parametrize("kind", ["llama3", "any"])
def test_b89_rope_freqs_divide_the_frequencies(tmp_path, kind):
    config = CONFIG | {"head_dim": 64, "hidden_size": 576, "rope_theta": 500_000.0}
    factors = llama3_factors(config, LLAMA3) if kind == "llama3" else np.geomspace(1, 7, 32)
    file = files.write_gguf(
        tmp_path / "m.gguf",
        config,
        tiny.make_weights(config, seed=1),
        extra={"rope_freqs.weight": factors.astype(np.float32)},
    )
    found = open_checkpoint(file).hf_config
    assert found["rope_scaling"]["rope_type"] == ("llama3" if kind == "llama3" else "longrope")
    if kind == "llama3":
        assert found["rope_scaling"] == LLAMA3
    got = rope.from_hf(found, head_dim=64)
    np.testing.assert_allclose(got.frequencies, frequencies(config) / factors, rtol=1e-5)
    assert got.scale == 1.0


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.attn_factor": 0.5,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 0.5 * (0.1 * np.log(4.0) + 1),
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling_in_metadata(tmp_path, metadata, scaling):
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, metadata=metadata)
    found = open_checkpoint(file).hf_config
    assert found.get("rope_scaling") == scaling
    assert rope.from_hf(found, head_dim=8)


def test_longrope_factors_are_read_from_tensors(tmp_path):
    given = tiny.CONFIGS["rope_longrope"]
    config = given | {"rope_scaling": given["rope_scaling"] | {"attention_factor": 1.25}}
    scaling = config["rope_scaling"]
    file = files.write_gguf(
        tmp_path / "m.gguf",
        config,
        tiny.make_weights(config, seed=1),
        metadata={
            "llama.rope.scaling.type": "longrope",
            "llama.rope.scaling.original_context_length": 32,
            "llama.rope.scaling.attn_factor": 1.25,
        },
        extra={
            "rope_factors_short.weight": np.array(scaling["short_factor"], np.float32),
            "rope_factors_long.weight": np.array(scaling["long_factor"], np.float32),
        },
    )
    found = open_checkpoint(file).hf_config["rope_scaling"]
    assert found == {key: value for key, value in scaling.items() if key in found}
