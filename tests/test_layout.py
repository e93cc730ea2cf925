"""The import directions and the tree: laws, not habits."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "model_zoo", "pallas_kernels")
HOST = {"jaxserve.request", "jaxserve.config", "jaxserve.costs"}

# part -> parts of the project it may import, itself always included
ALLOWED = {
    "pallas_kernels": set(),
    "model_zoo": {"pallas_kernels"},
    "jaxserve.request": set(),
    "jaxserve.config": set(),
    "jaxserve.costs": set(),
    "jaxserve.metrics": HOST,
    "jaxserve.kv": HOST,
    "jaxserve.scheduler": HOST | {"jaxserve.kv", "jaxserve.batch.buckets"},
    "jaxserve.batch": HOST | {"jaxserve.kv", "jaxserve.scheduler", "model_zoo.step_inputs"},
    "jaxserve.engine": HOST
    | {"jaxserve.scheduler", "jaxserve.kv", "jaxserve.batch", "jaxserve.metrics"},
    "jaxserve.text": HOST | {"model_zoo.gguf_header"},
    "jaxserve.completion": HOST,
    "jaxserve.openai_api": HOST | {"jaxserve.completion", "jaxserve.text"},
    "jaxserve.server": HOST
    | {
        *("jaxserve.completion", "jaxserve.driver", "jaxserve.engine", "jaxserve.metrics"),
        *("jaxserve.openai_api", "jaxserve.scheduler", "jaxserve.settings", "jaxserve.text"),
        *("jaxserve.build", "jaxserve.offline"),
    },
    "jaxserve.fair_lock": set(),
    "jaxserve.interrupts": set(),
    "jaxserve.driver": HOST | {"jaxserve.completion", "jaxserve.engine", "jaxserve.text"},
    "jaxserve.runner": HOST | {"jaxserve.batch.step", "model_zoo", "pallas_kernels"},
}
HOST_OF_MODELS = ("model_zoo.step_inputs", "model_zoo.gguf_header")
NO_JAX = ("request", "config", "costs", "metrics", "kv", "scheduler", "batch", "engine", "text")
NO_JAX += ("openai_api", "server")
TOP_LEVEL = {
    *("pyproject.toml", "README.md", "WORKSPACE.md", "CHANGELOG.md", "LICENSE"),
    *(".python-version", ".ci", ".gitignore", "jaxserve", "pallas_kernels", "model_zoo"),
    *("configs", "tests", "tools"),
}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Dotted names a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {
                name if (name := f"{node.module}.{alias.name}") in MODULES else str(node.module)
                for alias in node.names
            }
    return found


def part_of(module: str) -> str | None:
    fits = [part for part in ALLOWED if module == part or module.startswith(part + ".")]
    return max(fits, key=len, default=None)


@pytest.mark.parametrize("module", sorted(m for m in MODULES if part_of(m)))
def test_imports_point_down(module):
    part = part_of(module)
    assert part is not None
    allowed = ALLOWED[part] | {part}
    for name in imports(MODULES[module]):
        if name.split(".")[0] in PACKAGES and name not in PACKAGES:
            fits = any(name == a or name.startswith(a + ".") for a in allowed)
            assert fits, f"{module} imports {name}; {part} may import {sorted(allowed)}"


@pytest.mark.parametrize("part", NO_JAX)
def test_host_half_names_no_jax(part):
    for module, path in MODULES.items():
        own = module == f"jaxserve.{part}" or module.startswith(f"jaxserve.{part}.")
        if own or module in HOST_OF_MODELS:
            heads = {name.split(".")[0] for name in imports(path)}
            assert not heads & {"jax", "jaxlib", "flax", "orbax"}, module


def test_absl_and_argparse_live_in_the_command_line_only():
    for module, path in MODULES.items():
        if not module.startswith("jaxserve.cli"):
            heads = {name.split(".")[0] for name in imports(path)}
            assert not heads & {"absl", "argparse"}, module


@pytest.mark.parametrize("path", sorted(MODULES.values()), ids=str)
def test_nothing_private_of_jax_and_no_pickle(path):
    for name in imports(path):
        assert not name.startswith("jax._src"), path
        assert name.split(".")[0] not in ("pickle", "cloudpickle", "dill"), path


def test_importing_the_package_and_the_command_line_does_not_import_jax():
    code = "import sys, jaxserve, jaxserve.cli.main; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_top_level_holds_only_what_was_agreed():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout")
    assert {name.split("/")[0] for name in names.stdout.splitlines()} <= TOP_LEVEL
