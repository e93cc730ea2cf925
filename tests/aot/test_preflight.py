"""`jaxserve preflight` end to end: what fits, what does not, and what is asked wrongly."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.build import assemble
from jaxserve.preflight import target
from jaxserve.runner import bundle
from jaxserve.settings import read
from tests.equivalence.rig import write_tokenizer
from tests.models.weight_files import write_folder
from tests.reference import files, tiny
from tools import preflight_configs

ROOT = Path(__file__).parent.parent.parent


def tpu(test: Any) -> Any:
    """Needs a compiler for TPUs."""
    missing = importlib.util.find_spec("libtpu") is None
    return pytest.mark.tpu(pytest.mark.skipif(missing, reason="libtpu is not installed")(test))


GPU = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no compiler for GPUs"
)
HF = tiny._with(  # weights of some MiB, so that a copy of one is told from small change
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    hidden_size=1024,
    intermediate_size=2048,
    vocab_size=4096,
)
SETTINGS = (
    *("--set", "model.max_len=256", "--set", "scheduler.token_budget=16"),
    *("--set", "scheduler.max_seqs=8", "--set", "buckets.tokens=16", "--set", "buckets.rows=8"),
    *("--set", "sampling.random=false", "--set", "sampling.penalties=false"),
    *("--set", "sampling.logprobs=false", "--set", "cache.block_size=16"),
)


WINDOWS = {  # of six layers five see 64 tokens: six groups of one layer, several heads on a chip
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 128,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with config.json and nothing else: no weights are needed."""
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "config.json").write_text(json.dumps(HF))
    return str(folder)


def preflight(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve.cli.main", "preflight", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1200)


def report(*arguments: str, code: int = 0) -> dict[str, Any]:
    ran = preflight("--json", *arguments)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def test_the_cpu_compiles_every_program_and_the_kv_stays_in_place(model: str):
    found = report("--target", "cpu", "--model", model, *SETTINGS, "--set", "cache.num_blocks=64")
    names = [program["name"] for program in found["programs"]]
    assert names == ["embed[16]", "layer[16]", "keep[16]", "head[8]", "greedy[8]"]
    layer = found["programs"][1]
    assert found["fits"] and not found["problems"] and not found["warnings"]
    assert layer["memory"]["aliased"] >= 61 * found["kv"]["block_bytes"]
    assert layer["collectives"] == {} and layer["compile_s"] > 0
    assert found["steps"][0]["estimated_ms"] is None  # nobody knows this machine's figures


def test_a_bundle_is_what_the_engine_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = files.tiny_case("gqa_9_3")
    folder = tmp_path / "model"
    write_folder(folder, case.config, case.weights())
    write_tokenizer(folder)
    settings = (*SETTINGS, "--set", "cache.num_blocks=64", "--set", "model.dtype=float32")
    wanted = ("--target", "cpu", "--model", str(folder), "--bundle", str(tmp_path / "bundle"))
    names = [program["name"] for program in report(*wanted, *settings)["programs"]]
    found: list[str] = []
    load = bundle.load

    def loaded(root: Path, spec: Any, lowered: Any) -> Any:
        program = load(root, spec, lowered)
        found.append(spec.name if program is not None else f"no {spec.name}")
        return program

    monkeypatch.setattr(bundle, "load", loaded)
    assigned = [text for text in settings if text != "--set"]
    config = read(None, [*assigned, f"model.name={folder}", f"runner.bundle={tmp_path}/bundle"])
    assemble(config).close()
    assert found == names


@tpu
def test_a_tpu_slice_that_is_not_here(model: str):
    """Four chips: two sums a layer and one for the embedding, KV in place, no weight is moved."""
    settings = (*SETTINGS, "--set", "mesh.tensor=4")
    found = report("--target", "v5e:2x2", "--model", model, *settings)
    backbone = found["programs"][0]
    assert found["fits"], found["problems"]
    assert backbone["collectives"].get("all-reduce", 0) >= 2
    assert backbone["kv_copies"] == [] and backbone["weight_copies"] == []
    assert found["kv"]["largest_tokens"] > 100_000
    assert found["steps"][0]["estimated_ms"] > 0
    assert any("estimate" in line for line in found["checked"])


def check_groups(target: str, kernels: str, tmp_path: Path) -> None:
    """A model of `WINDOWS` on one device: the KV stays in place, and windows buy context."""
    (tmp_path / "config.json").write_text(json.dumps(WINDOWS))
    settings = ("--set", f"runner.kernels={kernels}", "--set", "model.max_len=4096")
    found = report("--target", target, "--model", str(tmp_path), *SETTINGS, *settings)
    backbone, kv = found["programs"][0], found["kv"]
    assert found["fits"], found["problems"]
    assert backbone["kv_copies"] == [] and backbone["weight_copies"] == []
    pool = found["device"]["compiled_kv_gib"] * 2**30
    assert backbone["memory"]["aliased"] >= pool > 5 * backbone["memory"]["temp"]
    assert (backbone["kernels"] > 0) == (kernels == "auto")
    assert kv["block_bytes"] == 2 * 4 * 16 * 128 * 2, "of one layer"
    assert kv["largest_tokens"] > 4 * kv["largest_blocks"] * 16 / 6


@tpu
@pytest.mark.parametrize("kernels", ["xla", "auto"])
def test_groups_of_layers_and_several_heads_on_a_chip(kernels: str, tmp_path: Path):
    check_groups("v6e:1x1", kernels, tmp_path)


@GPU
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xla", "auto"])
def test_groups_of_layers_on_a_gpu(kernels: str, tmp_path: Path):
    check_groups("h200", kernels, tmp_path)


@tpu
def test_the_lints_find_what_they_are_for():
    """In a TPU's own text: a KV that is not donated is copied, a turned weight is moved."""
    command = [sys.executable, "-m", "tests.aot.controls"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["kept"] == [] and found["weight used"] == []
    assert found["not donated"] and found["weight turned"]


@tpu
@pytest.mark.parametrize(
    "name", ["v4:1x1x1", "v5e", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1", "v6e:2x4"]
)
def test_a_single_chip_of_any_kind_can_be_compiled_for(name: str):
    """libtpu 0.0.48 describes none: "not divisible by chips_per_host_bounds 2x2x1"."""
    code = (
        "import json; from jaxserve.preflight import target; wanted = target.parse({!r}); "
        "target.set_environment(wanted, 0); found = target.devices(wanted); "
        "print(json.dumps([target.num_devices(wanted), [list(d.coords) for d in found]]))"
    )
    command = [sys.executable, "-c", code.format(name)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert ran.returncode == 0, ran.stderr
    count, coords = json.loads(ran.stdout.splitlines()[-1])
    assert len(coords) == count
    assert len(set(map(tuple, coords))) == (8 if name == "v6e:2x4" else 1), "of one chip"


@tpu
@pytest.mark.slow
def test_the_largest_pool_compiles_and_a_larger_one_does_not_fit(model: str):
    found = report("--target", "v5e:1x1", "--model", model, "--max-kv", *SETTINGS)
    largest = found["kv"]["largest_blocks"]
    assert found["kv"]["searched"] and largest > 1000
    asked = ("--target", "v5e:1x1", "--model", model, *SETTINGS, "--set")
    assert report(*asked, f"cache.num_blocks={largest}")["fits"]
    wrong = report(*asked, f"cache.num_blocks={2 * largest}", code=1)
    assert wrong["problems"] and wrong["advice"]


@pytest.mark.slow
@GPU
def test_a_gpu_without_kernels_takes_xla_and_the_report_says_so(model: str):
    """What a Hopper kernel would do to the compiler of an older GPU: abort."""
    settings = (*SETTINGS, "--set", "runner.kernels=auto")
    for name, kernels in (("a100", 0), ("h200", 1)):
        found = report("--target", name, "--model", model, *settings)
        assert found["fits"], found["problems"]
        assert (found["programs"][0]["kernels"] > 0) == kernels
        said = [line for line in found["checked"] if "compute capability 8.0" in line]
        assert len(said) == 1 - kernels, found["checked"]


def test_tables_say_what_the_object_says(model: str):
    ran = preflight("--target", "cpu", "--model", model, *SETTINGS, "--set", "cache.num_blocks=64")
    assert ran.returncode == 0, ran.stderr
    assert "layer[16]" in ran.stdout and ran.stdout.rstrip().endswith("cpu: fits")


BAD = {
    "target": (("--target", "v99"), "is not known"),
    "topology": (("--target", "v5e:8"), "topology"),
    "model": (("--target", "cpu", "--model", "nobody/nothing-of-this-name"), "not known"),
    "kv heads": (("--target", "cpu", "--set", "mesh.tensor=3", "--model", "M"), "kv heads"),
    "context": (("--target", "cpu", "--context", "0"), "--context"),
    "settings": (("--target", "cpu", "--set", "mesh.tensors=2"), "mesh.tensor"),
    "pool of a bundle": (("--target", "cpu", "--bundle", "x", "--model", "M"), "cache.num_blocks"),
    "gpu bundle": (("--target", "h200", "--bundle", "x", "--model", "M"), "not tuned"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_usage_is_one_line_and_exit_code_2(case: str, model: str, monkeypatch):
    arguments, words = BAD[case]
    if case == "gpu bundle" and target.missing_compiler(target.parse("h200")):
        words = "jaxserve[cuda]"
    ran = preflight(*(model if word == "M" else word for word in arguments))
    assert ran.returncode == 2, ran.stderr
    assert words in ran.stderr and len(ran.stderr.splitlines()) == 1
    assert ran.stdout == ""


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x4", "tpu"), ("h200", "cuda")])
def test_a_missing_extra_is_named(name: str, extra: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    message = target.missing_compiler(target.parse(name))
    assert message is not None and f"pip install 'jaxserve[{extra}]'" in message


def test_every_config_has_a_target_and_the_shapes_of_its_model():
    from jaxserve import settings
    from jaxserve.preflight import describe

    names = {path.stem for path in preflight_configs.CONFIGS.glob("*.toml")}
    assert names == set(preflight_configs.TARGETS)
    for name, wanted in preflight_configs.TARGETS.items():
        path = preflight_configs.CONFIGS / f"{name}.toml"
        config = settings.read(path)
        assert describe.hf_config(config.model.name, path)["num_hidden_layers"] > 1
        devices = target.num_devices(target.parse(wanted))
        assert config.mesh.data * config.mesh.tensor == (devices or 1), name
        assert wanted == "cpu" or f"--target {wanted} " in path.read_text(), name


def test_every_family_has_a_config():
    from jaxserve import settings
    from jaxserve.preflight import describe
    from model_zoo import registry

    found = set()
    for path in preflight_configs.CONFIGS.glob("*.toml"):
        found.add(describe.hf_config(settings.read(path).model.name, path)["model_type"])
    assert found >= set(registry.known()), "a file under configs/ for each"


@tpu
def test_a_ready_made_config_passes_without_its_samplers():
    """OLMo 2 7B over eight chips; the rest of its programs, and the others, take minutes."""
    name = "tpu-v5e-8-olmo2-7b"
    off = (f"sampling.{kind}=false" for kind in ("random", "penalties", "logprobs"))
    settings = (word for text in off for word in ("--set", text))
    path = str(preflight_configs.CONFIGS / f"{name}.toml")
    asked = ("--target", preflight_configs.TARGETS[name], "--config", path, "--largest")
    found = report(*asked, *settings)
    assert found["fits"] and not found["problems"]
    backbone = found["programs"][0]
    assert backbone["kv_copies"] == [] and backbone["weight_copies"] == []
    assert backbone["collectives"]["all-reduce"] >= 2
    assert found["kv"]["largest_tokens"] > 200_000


@pytest.mark.slow
@pytest.mark.parametrize("name", preflight_configs.TARGETS)
def test_every_config_passes(name: str):
    missing = target.missing_compiler(target.parse(preflight_configs.TARGETS[name]))
    if missing:
        pytest.skip(missing)
    code, found = preflight_configs.preflight(name)
    assert code == 0, found
