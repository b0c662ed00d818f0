#!/usr/bin/env bash
# From an empty machine (Python >= 3.11) to an audited report. Flags are passed on: ./run_all.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source .ci/setup.sh train
exec .venv/bin/ttt run --all --size mini "$@"
