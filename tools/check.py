"""All checks but the tests, for people and for CI: format, lint, types, layout.

python -m tools.check          report
python -m tools.check --fix    let ruff mend what it can first
"""

import subprocess
import sys
import time

CHECKS = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["pyright"],
    "layout": ["pytest", "-q", "tests/test_layout.py"],
}
FIXES = {"lint": ["ruff", "check", "--fix", "."], "format": ["ruff", "format", "."]}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--fix"]):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments == ["--fix"]:
        for command in FIXES.values():
            subprocess.run([sys.executable, "-m", *command], check=False)
    failed = []
    for name, command in CHECKS.items():
        start = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
        print(f"{name:8} {'ok' if code == 0 else 'FAILED'} {time.perf_counter() - start:.1f} s")
        if code:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
