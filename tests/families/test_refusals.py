"""What cannot run is refused in one line that names the file, before memory is taken."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from model_zoo import registry
from model_zoo.checkpoint import Checkpoint
from model_zoo.decoder_config import DecoderConfig
from model_zoo.weights import load_module, open_checkpoint
from tests.families import gguf_files
from tests.families.cases import NAMES, case
from tests.models.weight_files import write_folder

MIB = 2**20


def changed(folder: Path, name: str, **values: Any) -> Path:
    """A copy of a committed checkpoint with another config.json."""
    shutil.copytree(case(name).folder, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case(name).config | values))
    return folder


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("llama", {"model_type": "mamba"}, "model_type='mamba', which is not supported; supp"),
        ("llama", {"model_type": "minicpm", "auto_map": {"AutoModel": "m.M"}}, "its own code"),
        ("llama", {"model_type": None}, "model_type='None', which is not supported"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "'modeling_x.X' is code"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        ("llama", {"sliding_window": 64}, "sliding_window=64 is not supported by llama"),
        ("qwen3", {"num_key_value_heads": 3}, "is no multiple of"),
        ("qwen3", {"head_dim": 2**20}, "head_dim must be a whole number from 1 to 65536"),
        ("qwen3", {"hidden_size": -4}, "hidden_size must be a whole number from 1"),
        ("qwen3", {"hidden_size": 2**30, "vocab_size": 2**30}, "more than any has"),
        ("qwen3", {"vocab_size": 63}, r"embed_tokens.weight is \[64, 32\], needs \[63, 32\]"),
        ("qwen3", {"num_hidden_layers": 4}, "11 missing tensors: model.layers.3.self_attn.q_proj"),
        ("qwen3", {"num_hidden_layers": 2}, "11 unexpected tensors: model.layers.2."),
        ("qwen3", {"attention_bias": True}, "missing tensors: model.layers.0.self_attn.q_proj.bi"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 of num_local_experts=6"),
        ("mixtral", {"num_local_experts": 3}, "9 unexpected tensors: .*experts.3.w1.weight"),
        ("mixtral", {"num_local_experts": 16384, "num_hidden_layers": 99}, "more than any has"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must be a list of 3"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'; supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "new"}}}, "type 'new'"),
        ("phi3", {"rope_scaling": [1]}, "rope_scaling must be an object"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number"),
        ("olmo2", {"quantization_config": {"quant_method": "awq"}}, "quantised by awq"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, name: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_module(open_checkpoint(changed(tmp_path, name, **values)), "float32")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_phi3_may_bring_the_code_that_transformers_has(tmp_path: Path) -> None:
    own = {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert load_module(open_checkpoint(changed(tmp_path, "phi3", auto_map=own)), "float32")


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "phi3"])
def test_any_missing_or_extra_tensor_is_named(tmp_path: Path, name: str) -> None:
    weights = load_file(case(name).folder / "model.safetensors")
    for tensor in [*sorted(weights)[:: len(weights) // 5], sorted(weights)[-1]]:
        some = {key: array for key, array in weights.items() if key != tensor}
        folder = write_folder(tmp_path, case(name).config, some)
        with pytest.raises(ValueError, match=f"1 missing tensors: {tensor}"):
            load_module(open_checkpoint(folder), "float32")
    extra = {"model.layers.0.self_attn.sinks": np.ones(4, np.float32)}
    folder = write_folder(tmp_path, case(name).config, weights | extra)
    with pytest.raises(ValueError, match="1 unexpected tensors: model.layers.0.self_attn.sinks"):
        load_module(open_checkpoint(folder), "float32")


STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**40, 2**63, 10**30, -(10**30)]),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention"]), st.none()),
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_config_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """One or two values of a real config.json replaced by anything that JSON can hold."""
    config = dict(case(name).config)
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from(sorted(config)))
        inner = config[key]
        if isinstance(inner, dict) and inner and data.draw(st.booleans()):
            config[key] = inner | {data.draw(st.sampled_from(sorted(inner))): data.draw(STRANGE)}
        else:
            config[key] = data.draw(STRANGE)
    checkpoint = Checkpoint("a folder", config, {}, lambda name: np.empty(0))
    try:
        _, found = registry.configure(checkpoint, "float32")
    except ValueError as error:
        assert str(error).startswith("a folder: ")
    else:
        assert isinstance(found, DecoderConfig)
        assert len(found.windows) in (0, found.L)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Whole files of both formats by name."""
    folder = tmp_path_factory.mktemp("whole")
    found = {"model.safetensors": (case("gemma3").folder / "model.safetensors").read_bytes()}
    for name in ("gemma3", "qwen3_moe", "phi3"):
        path = folder / f"{name}.gguf"
        gguf_files.write(path, name, open_checkpoint(case(name).folder))
        found[path.name] = path.read_bytes()
    return found


@settings(derandomize=True, deadline=None, max_examples=250)
@given(data=st.data())
def test_damage_opens_or_is_named_and_takes_no_memory(
    files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of a header changed, or the file cut: B88, B89."""
    name = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[name])
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, min(6000, len(content) - 1)))
            content[at] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case("gemma3").config))
    path = folder / name
    path.write_bytes(bytes(content))
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(folder if name == "model.safetensors" else path)
        registry.configure(checkpoint, "float32")
    except ValueError as error:
        assert str(folder) in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * MIB


def test_a_lying_header_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """Offsets that point outside, and a shape that its bytes do not hold."""
    weights = {"a": np.ones((4, 4), np.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case("llama").config))
    whole = (tmp_path / "model.safetensors").read_bytes()
    for old, new in ((b"[4,4]", b"[9,9]"), (b"[0,64]", b"[0,99]"), (b'"F32"', b'"F64"')):
        assert old in whole
        (tmp_path / "model.safetensors").write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match="damaged safetensors file"):
            open_checkpoint(tmp_path)
