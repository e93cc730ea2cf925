#!/usr/bin/env bash
# One call on a machine with an accelerator: are the kernels right, and how near are they to what the
# chip can do?  Installs nothing; takes less than 8 minutes; writes JSON.  See tools/check_device.py.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m tools.check_device "$@"
