"""Preflight of every ready-made config on the machine it is for: a table, and exit code 1 when one
does not fit.

python -m tools.preflight_configs [--all] [NAME ...]

Compiles the largest program of each kind; `--all` compiles every program.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent.parent / "configs"
TARGETS = {
    "cpu-smollm2-135m": "cpu",
    "tpu-v5e-8-llama3.1-8b": "v5e:2x4",
    "tpu-v6e-4-llama3.1-8b": "v6e:2x2",
    "tpu-v5p-8-llama3.1-70b": "v5p:2x2x2",
    "tpu-v6e-8-llama3.1-70b": "v6e:2x4",
    "tpu-v6e-8-qwen3-32b": "v6e:2x4",
    "tpu-v6e-4-qwen2.5-7b": "v6e:2x2",
    "tpu-v6e-8-qwen3-30b-a3b": "v6e:2x4",
    "tpu-v6e-8-mixtral-8x7b": "v6e:2x4",
    "tpu-v6e-4-gemma2-9b": "v6e:2x2",
    "tpu-v5e-1-gemma3-1b": "v5e:1x1",
    "tpu-v5e-8-mistral-7b": "v5e:2x4",
    "tpu-v6e-4-phi-4": "v6e:2x2",
    "tpu-v5e-8-olmo2-7b": "v5e:2x4",
    "tpu-v6e-4-granite3.1-8b": "v6e:2x2",
    "gpu-h200-llama3.1-8b": "h200",
    "gpu-h200-4-llama3.1-70b": "h200:4",
}
COLUMNS = "| config | target | programs | compile s | weights | scratch | KV pool | tokens | fits |"


def preflight(name: str, *, everything: bool = False) -> tuple[int, dict[str, Any] | str]:
    """Exit code and report of one config; the message where there is no report."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "preflight", "--json"]
    command += ["--target", TARGETS[name], "--config", str(CONFIGS / f"{name}.toml")]
    command += [] if everything else ["--largest"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode, json.loads(ran.stdout) if ran.stdout else ran.stderr.strip()


def row(name: str, report: dict[str, Any]) -> str:
    """One line of the table; sizes are GiB on one device."""
    device, kv = report["device"], report["kv"]
    pool = "" if kv["largest_gib"] is None else f"{kv['largest_gib']:.2f}"
    tokens = "" if kv["largest_tokens"] is None else f"{kv['largest_tokens']:,}"
    cells = [name, report["target"], len(report["programs"]), f"{report['compile_s']:.0f}"]
    cells += [f"{device['weights_gib']:.2f}", f"{device['scratch_gib']:.2f}", pool, tokens]
    cells.append("yes" if report["fits"] else "no: " + "; ".join(report["problems"]))
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: list[str]) -> int:
    names = [word for word in arguments if word != "--all"] or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        print(f"no such config: {', '.join(unknown)}\n{__doc__}", file=sys.stderr)
        return 2
    print(COLUMNS)
    print("|" + "---|" * (COLUMNS.count("|") - 1), flush=True)
    failed = 0
    for name in names:
        code, report = preflight(name, everything="--all" in arguments)
        failed += code != 0
        text = row(name, report) if isinstance(report, dict) else f"| {name} | {report} |"
        print(text, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
