#!/usr/bin/env bash
# Everything worth measuring on the first day with a GPU, on a machine without network; rows: systems/gpu_day.yaml.
#   systems/gpu_day.sh                 all stages
#   systems/gpu_day.sh check bert      some of them, each within 9 minutes
# $PYTHON, else python3, has torch, torchvision, triton and transformers; the rest comes from wheels/ (wheels.sh).
# After each row: its JSON in $OUT/<hardware>, else results/throughput/gpu_day/<hardware>; the page in $OUT, else report/.
# The stages that are worth most come first.
# Exit code 1: a row was not ok. Without a GPU the rows without gpus=N run at size mini, as a rehearsal.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
if ! PYTHON="$("$python" -c 'import sys; sys.version_info >= (3, 11) or sys.exit(1); print(sys.executable)' 2>/dev/null)"; then
  echo "error: $python is not Python 3.11 or newer; PYTHON=.venv/bin/python names another one" >&2
  exit 2
fi
export PYTHON
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
[ ! -d "$root/wheels" ] || "$root/systems/wheels.sh" install "$site"
export PYTHONPATH="$site:$root${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -c 'import importlib.util, sys
names = "mlperf_logging pydantic psutil cpuinfo pynvml rich jinja2 yaml pytest scipy sklearn google_crc32c torch".split()
lacking = [name for name in names if importlib.util.find_spec(name) is None]
sys.exit(f"error: {sys.executable} lacks {lacking}; systems/wheels.sh brings all but torch, or PYTHON=.venv/bin/python names another Python" if lacking else 0)' || exit 2
"$PYTHON" -m common.measure.gpu_day "$@"
