#!/usr/bin/env bash
# Set-up, then the tests. Flags are passed on to pytest: tests/run.sh -k parity
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/setup.sh train,dali,dev
.venv/bin/ruff check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
