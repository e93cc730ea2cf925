"""The command line's contract: exit codes, where things are printed, how fast help is."""

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

DETERMINISTIC = ("--set", "runner.deterministic=true", "--set", "scheduler.token_budget=64")
COMMANDS = ("generate", "batch", "bench", "preflight", "model", "config")


def test_help_needs_nothing_heavy():
    probe = (
        "import sys\n"
        "from jaxserve.cli.main import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as stop:\n"
        "    heavy = {'jax', 'numpy', 'rich', 'absl', 'tokenizers'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else stop.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_importing_the_package_imports_nothing_heavy():
    probe = (
        "import sys, jaxserve\n"
        "assert not {'jax', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "jaxserve.SamplingParams, jaxserve.EngineConfig, jaxserve.LLM, jaxserve.Completion\n"
        "assert 'jax' not in sys.modules\n"
        "assert {'LLM', 'CacheConfig', '__version__'} <= set(dir(jaxserve))\n"
        "try:\n"
        "    jaxserve.nothing\n"
        "except AttributeError as error:\n"
        "    assert 'nothing' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, jaxserve):
    ran = jaxserve(command, "--help")
    assert ran.code == 0
    assert f"jaxserve {command}" in ran.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["COMMAND"]),
        (["nonsense"], ["nonsense", "generate"]),
        (["generate"], ["PROMPT"]),
        (["generate", "x", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["generate", "x", "--max-token", "3"], ["--max-token"]),
        (["generate", "x", "--max-tokens", "-3"], ["max_tokens=-3"]),
        (["generate", "x", "--temperature", "nan"], ["temperature"]),
        (["generate", "x", "--top-p", "2"], ["top_p"]),
        (["generate", "x", "--stop", ""], ["stop"]),
        (["generate", "x", "--n", "2"], ["--json"]),
        (["generate", "x", "--raw", "--chat"], ["--raw", "--chat"]),
        (["generate", "x", "--raw", "--system", "y"], ["--system", "--raw"]),
        (["generate", "x", "--set", "scheduler.budget=3"], ["scheduler", "budget"]),
        (["generate", "x", "--config", "no/such.toml"], ["no/such.toml"]),
        (["generate", "x", "--model", ""], ["--model"]),
        (["generate", "a\udc80"], ["PROMPT", "Unicode"]),
        (["config", "--set", "cache.block_size=0"], ["cache.block_size=0"]),
        (["config", *DETERMINISTIC], ["runner.deterministic", "raise the budget"]),
        (["batch", "in.jsonl"], ["--output"]),
        (["batch", "i", "--output", "o", "--grace", "-1"], ["--grace", "-1"]),
        (["batch", "i", "--output", "o", "--sync-interval", "inf"], ["--sync-interval", "inf"]),
        (["batch", "i", "--output", "o", "--price-per-hour", "nan"], ["--price-per-hour"]),
        (["batch", "i", "--output", "o", "--max-errors", "-1"], ["--max-errors", "-1"]),
        (["batch", "i", "--output", "o", "--roll-size", "0.5"], ["--roll-size", "512M"]),
        (["batch", "i", "--output", "o", "--roll-size", "much"], ["--roll-size", "much", "512M"]),
        (["batch", "i", "--output", "o", "--ray-workers", "2"], ["--ray-workers", "--ray"]),
        (["batch", "i", "--output", "o", "--ray-resources", "x"], ["--ray-resources", "TPU=4"]),
        (["bench", "--workload", "no.jsonl"], ["no.jsonl"]),
        (["bench", "--workload", "no.jsonl", "--repeat", "0"], ["--repeat"]),
        (["bench", "--workload", "no.jsonl", "--slo-ttft-ms", "-1"], ["--slo-ttft-ms"]),
    ],
)
def test_bad_usage_is_one_line_and_exit_2_before_anything_heavy(
    argv: list[str], words: list[str], jaxserve, assembled
):
    ran = jaxserve(*argv)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("jaxserve: error: ")
    assert ran.err.count("\n") == 1
    assert all(word in ran.err for word in words), ran.err
    assert assembled == []


def test_config_prints_what_would_run_and_reads_it_back(tmp_path: Path, jaxserve, assembled):
    first = jaxserve("config", "--set", "scheduler.token_budget=99", "--model", "m")
    assert first.code == 0
    printed = tomllib.loads(first.out)
    assert printed["model"]["name"] == "m"
    assert printed["scheduler"]["token_budget"] == printed["buckets"]["tokens"][-1] == 99
    assert printed["buckets"]["rows"][-1] == printed["scheduler"]["max_seqs"]
    path = tmp_path / "c.toml"
    path.write_text(first.out)
    assert jaxserve("config", "--config", path) == first
    assert assembled == []


def test_what_config_derives_is_what_runs(jaxserve, assembled):
    options = ("--set", "scheduler.token_budget=100", "--set", "model.max_len=200")
    printed = tomllib.loads(jaxserve("config", *options).out)
    jaxserve("generate", "x", "--max-tokens", 1, *options)
    running = assembled[0].config
    for section in ("buckets", "scheduler"):
        values = dataclasses.asdict(getattr(running, section))
        assert printed[section] == {
            key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
        }


def test_a_model_that_cannot_be_loaded_is_bad_usage(jaxserve, monkeypatch):
    def assemble(*_: object, **__: object) -> None:
        raise ValueError("no such model:\n  x")

    monkeypatch.setattr(sys.modules["jaxserve.build"], "assemble", assemble)
    ran = jaxserve("generate", "x", "--model", "x")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "jaxserve: error: no such model: x\n"


def test_an_interrupt_ends_without_a_traceback(jaxserve, monkeypatch):
    def assemble(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["jaxserve.build"], "assemble", assemble)
    assert jaxserve("generate", "x") == (130, "", "")


def test_a_program_that_fails_its_proof_is_one_line(jaxserve, monkeypatch):
    """So is a device without memory: both raise RuntimeError."""

    def assemble(*args: object, **options: object) -> None:
        raise RuntimeError("program backbone[8] differs; leave it out of buckets.tokens")

    monkeypatch.setattr(sys.modules["jaxserve.build"], "assemble", assemble)
    ran = jaxserve("generate", "hello")
    assert ran.code == 2 and ran.out == ""
    assert ran.err.count("\n") == 1 and "buckets.tokens" in ran.err
