#!/usr/bin/env bash
# A TPU VM for jaxserve: create, install, pull, preflight, job, delete.  --dry-run prints the commands.
# See `tools/tpu_vm.sh --help`, and "On a Cloud TPU" in README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m tools.tpu_vm "$@"
