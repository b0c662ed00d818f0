#!/usr/bin/env bash
# Set-up, then the tests without the slow ones. Flags are passed on to pytest: tests/run.sh -k parity, -m slow, -m ''
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/setup.sh train,dali,hf,track,dev
.venv/bin/ruff check .
.venv/bin/mypy
for benchmark in image_classification language_bert; do .venv/bin/ttt data prepare $benchmark --size mini; done
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not slow" "$@"
