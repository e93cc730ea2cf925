"""A Ray cluster of two workers on this machine, and a tiny random model for its actors."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.weight_files import write_folder
from tests.reference import files

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model folder; starts in seconds."""
    from tests.equivalence.rig import write_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    case = files.tiny_case("mqa")
    write_folder(folder, case.config, case.weights())
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all engines, so that only the first one compiles."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def engine_options(tiny_model: Path, compile_cache: Path) -> list[str]:
    """Command line options of a small engine that starts quickly."""
    values = {
        "model.dtype": "float32",
        "model.max_len": 96,
        "cache.block_size": 8,
        "cache.num_blocks": 64,
        "scheduler.token_budget": 16,
        "scheduler.max_seqs": 4,
        "buckets.tokens": "16",
        "buckets.rows": "4",
        "sampling.penalties": "false",
        "sampling.logprobs": "false",
        "runner.prove": "false",
        "runner.compile_cache": compile_cache,
    }
    options = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return ["--model", str(tiny_model), *options]


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Its address.  Ray's own warnings while it starts and stops are not this project's."""
    ray = pytest.importorskip("ray")
    changed = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a FutureWarning of Ray
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "default",  # of Ray's processes
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield _start(ray)
        ray.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_FAILED: list[Exception] = []  # keeps the processes of a failed try, which Ray forgets, referenced


def _start(ray: Any) -> str:
    """Ray gives its own processes 30 s, which a busy machine may not keep: three tries."""
    while True:
        try:
            with warnings.catch_warnings():
                # Ray forks its processes; they start another program at once.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                context = ray.init(
                    num_cpus=2,
                    include_dashboard=False,
                    configure_logging=False,
                    log_to_driver=False,
                    object_store_memory=100 << 20,
                )
        except Exception as error:
            _FAILED.append(error)
            ray.shutdown()
            if len(_FAILED) == 3 or "timed out during startup" not in str(error):
                raise
        else:
            return context.address_info["gcs_address"]
