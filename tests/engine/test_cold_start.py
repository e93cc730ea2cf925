"""A start that compiles says so; one that finds everything in the cache says nothing."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli.cold_start import ColdStart
from tests.equivalence.rig import write_tokenizer
from tests.models.weight_files import write_folder
from tests.reference import tiny

STARTS = """
import json, sys
from jaxserve.build import assemble
from jaxserve.settings import read

heard = []
for more in ([], [], ["scheduler.policy=priority"]):
    heard.append([])
    assemble(read(None, sys.argv[1:] + more), on_compile=heard[-1].append).close()
print(json.dumps(heard))
"""


def test_only_a_start_that_compiles_is_heard(tmp_path: Path) -> None:
    """In a process of its own: JAX looks for the place of its cache once."""
    config = tiny.CONFIGS["mha"]
    folder = tmp_path / "model"
    write_folder(folder, config | {"head_dim": 16}, tiny.make_weights(config, seed=1))
    write_tokenizer(folder)
    settings = [
        f"model.name={folder}",
        f"runner.compile_cache={tmp_path / 'cache'}",
        *("cache.num_blocks=8", "scheduler.token_budget=8", "scheduler.max_seqs=2"),
        *("sampling.random=false", "sampling.penalties=false", "sampling.logprobs=false"),
    ]
    command = [sys.executable, "-c", STARTS, *settings]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr
    cold, warm, other = json.loads(ran.stdout)
    assert max(cold) >= 3  # a backbone, a head and a sampler at least
    assert warm == other == []  # the programs are the same, though traced again


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_it_is_one_plain_line() -> None:
    stream = io.StringIO()
    cold = ColdStart(stream, "later starts are faster")
    for count in (1, 2, 3):
        cold.update(count)
    cold.close()
    assert stream.getvalue() == (
        "jaxserve: compiling programs for these settings; later starts are faster\n"
    )


def test_on_a_terminal_it_goes_away_when_the_start_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    cold = ColdStart(stream, "later starts are faster")
    cold.update(1)
    cold.update(2)
    cold.close()
    written = stream.getvalue()
    assert "done); later starts are faster" in written
    assert written.endswith("\x1b[1A\x1b[2K")  # the line is erased


def test_a_warm_start_writes_nothing() -> None:
    stream = Terminal()
    ColdStart(stream, "later starts are faster").close()
    assert stream.getvalue() == ""
