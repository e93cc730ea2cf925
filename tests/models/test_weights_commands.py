"""jaxserve model inspect | convert | pull, as their users meet them."""

import argparse
import dataclasses
import json
import math
from pathlib import Path

import pytest

from jaxserve.cli import common, model
from jaxserve.inspect_model import describe, fits
from model_zoo.decoder_config import DecoderConfig
from model_zoo.weights import open_checkpoint
from tests.families import cases as families
from tests.models import weight_files as files
from tests.reference import tiny

MODELS = Path(__file__).parents[2] / "configs" / "models"
CONFIG = files.CONFIG | {"rope_scaling": {"type": "linear", "factor": 4.0}}
WEIGHTS = tiny.make_weights(CONFIG, seed=1)


def run(*words):
    parser = argparse.ArgumentParser()
    model.register(parser.add_subparsers(required=True))
    args = parser.parse_args(["model", *map(str, words)])
    return args.func(args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return files.write_folder(tmp_path_factory.mktemp("model"), CONFIG, WEIGHTS)


def test_inspect_counts_what_is_there(folder, capsys):
    assert run("inspect", folder, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == sum(array.size for array in WEIGHTS.values())
    assert facts["stored"] == {"float32": facts["parameters"]}
    assert facts["supported"] is True
    assert facts["tied"] is True
    assert facts["rope"] == {"type": "linear", "theta": 10_000.0 * 10, "factor": 4.0}
    layers, kv_heads, head_dim = 2, 3, 8
    assert facts["kv_bytes_per_token"]["bfloat16"] == 2 * layers * kv_heads * head_dim * 2
    assert facts["kv_bytes_per_token"]["float32"] == 2 * layers * kv_heads * head_dim * 4
    matrices = [array.shape for array in WEIGHTS.values() if array.ndim == 2]
    rows, inside = sum(shape[0] for shape in matrices), sum(map(math.prod, matrices))
    assert facts["weight_bytes"] == {
        "float32": 4 * facts["parameters"],
        "bfloat16": 2 * facts["parameters"],
        "int8": inside + 4 * rows + 2 * (facts["parameters"] - inside),
    }
    assert facts["context_length"] == CONFIG["max_position_embeddings"]
    sizes = ("layers", "hidden_size", "mlp_size", "heads", "kv_heads", "head_dim", "vocab_size")
    assert [facts[size] for size in sizes] == [2, 72, 96, 9, 3, 8, 64]


def test_inspect_is_readable(folder, capsys):
    assert run("inspect", folder) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["supported"].strip() == "yes"
    assert lines["rope"].strip() == "type linear, theta 100000.0, factor 4.0"


def test_inspect_reads_no_weights(folder):
    def read(name):
        raise AssertionError(f"read {name}")

    checkpoint = dataclasses.replace(open_checkpoint(folder), read=read)
    assert describe(checkpoint)["layers"] == 2


def test_inspect_says_what_is_not_supported(tmp_path, capsys):
    other = files.write_folder(tmp_path, CONFIG | {"model_type": "gpt9"}, WEIGHTS)
    assert run("inspect", other, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] is False
    assert "model_type='gpt9', which is not supported; supported: llama" in facts["reason"]
    assert (facts["layers"], facts["hidden_size"]) == (2, 72)


def inspected(name, capsys):
    assert run("inspect", families.FOLDER / name, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_says_which_tensors_are_not_those_of_the_config(tmp_path, capsys):
    vocab = CONFIG["vocab_size"] + 8
    other = files.write_folder(tmp_path, CONFIG | {"vocab_size": vocab}, WEIGHTS)
    assert run("inspect", other, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] is False
    assert f"embed_tokens.weight is [64, 72], needs [{vocab}, 72]" in facts["reason"]
    assert facts["vocab_size"] == vocab and "fits" not in facts


@pytest.mark.parametrize("name", [path.name for path in sorted(MODELS.glob("*.json"))])
def test_a_config_without_weights_says_what_it_would_take(name, tmp_path, capsys):
    assert run("inspect", MODELS / name, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] is True and facts["parameters"] > 10**8 and facts["stored"] == {}
    assert facts["weight_bytes"]["bfloat16"] == 2 * facts["parameters"]
    (tmp_path / "config.json").write_bytes((MODELS / name).read_bytes())
    assert run("inspect", tmp_path, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again | {"path": facts["path"]} == facts
    assert run("inspect", MODELS / name) == 0
    assert "no weights here" in capsys.readouterr().out
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(common.UsageError, match="pickle"):
        run("inspect", tmp_path)


def test_inspect_says_windows_ropes_and_experts(capsys):
    facts = inspected("gemma3", capsys)
    assert (facts["supported"], facts["window"], facts["window_layers"]) == (True, 13, 3)
    assert facts["rope"] == {
        "full_attention": {"type": "linear", "theta": 5000.0, "factor": 2.0},
        "sliding_attention": {"type": "default", "theta": 100.0},
    }
    facts = inspected("qwen3_moe", capsys)
    assert (facts["experts"], facts["experts_per_token"], facts["mlp_size"]) == (6, 3, 24)
    assert "window" not in facts
    assert facts["weight_bytes"]["int8"] < 0.7 * facts["weight_bytes"]["bfloat16"]
    assert facts["kv_bytes_per_token"] == {"float32": 2 * 3 * 2 * 16 * 4, "bfloat16": 384}


def test_inspect_says_on_what_a_model_fits():
    """Llama 3 70B: 131 GiB of weights and 40 GiB of KV for a request of full length."""
    big = DecoderConfig(
        L=80, D=8192, F=28672, N=64, K=8, H=128, V=128256, ropes=(), max_position=131072
    )
    found = fits(big)
    assert found["v5e"] == "not on 8 chips"
    assert found["v5p"].startswith("2 chips, 142,") and found["h200"].startswith("2 chips, 407,")
    assert found["v6e"].startswith("8 chips, ")


def test_a_rope_in_the_words_of_transformers_5_is_read(tmp_path, capsys):
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    config = CONFIG | {"rope_parameters": parameters, "rope_scaling": None}
    del config["rope_theta"]
    assert run("inspect", files.write_folder(tmp_path, config, WEIGHTS), "--json") == 0
    rope = json.loads(capsys.readouterr().out)["rope"]
    assert rope == {"type": "llama3", "theta": 5e5, "factor": 8.0}


def test_convert_writes_and_refuses(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("convert", folder, out, "--format", "orbax") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(out) in captured.err
    assert set(open_checkpoint(out).infos) == set(WEIGHTS)
    with pytest.raises(common.UsageError, match="add --force"):
        run("convert", folder, out, "--format", "orbax")


def test_errors_are_one_line(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not\na\nmodel")
    for words in (
        ("inspect", tmp_path / "x.gguf"),
        ("inspect", tmp_path / "nothing"),
        ("pull", "no/such/model"),
    ):
        with pytest.raises(common.UsageError) as caught:
            run(*words)
        assert "\n" not in str(caught.value)


def test_pull_prints_the_path(folder, capsys):
    assert run("pull", folder) == 0
    assert capsys.readouterr().out == f"{folder}\n"
