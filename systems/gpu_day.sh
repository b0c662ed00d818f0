#!/usr/bin/env bash
# Everything worth measuring on the first day with a GPU, on a machine without network:
#   systems/gpu_day.sh                 all stages: check graphs bert resnet variants trace train forms
#   systems/gpu_day.sh check bert      some of them, each within 9 minutes
# The interpreter is $PYTHON, else python3; it has torch, torchvision, triton and transformers. JSON files, one a row,
# go to $OUT, else results/throughput/; the page is report/gpu_day.html. Without a GPU all runs at size mini.
# What else is needed is fetched beforehand, on a machine with network, for the Python of the other one:
#   systems/gpu_day.sh wheels 3.12     into wheels/, 50 MB, of which scipy and scikit-learn are 45
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
needed=(pydantic psutil py-cpuinfo nvidia-ml-py rich jinja2 PyYAML pytest scikit-learn)
pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

if [ "${1:-}" = wheels ]; then
  target=(--only-binary=:all: --python-version "${2:?which Python does the other machine have, such as 3.12?}")
  for version in 2_28 2_27 2_17 2_12 2_5 1; do target+=(--platform "manylinux_${version}_x86_64"); done
  target+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --constraint .ci/constraints.txt --dest wheels)
  pip download "${target[@]}" "${needed[@]}"
  pip download "${target[@]}" --no-deps mlperf-logging  # its checkers' pandas is not needed here
  rm -f wheels/numpy-*.whl  # torch has it
  du -sh wheels
  exit
fi

site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
if [ -d wheels ]; then  # those that the interpreter lacks or has too old
  pip install --dry-run --no-index --find-links wheels --report "$site/report.json" "${needed[@]}"
  missing="$("$python" -c 'import json, sys
for each in json.load(open(sys.argv[1]))["install"]: print("{name}=={version}".format(**each["metadata"]))' "$site/report.json")"
  # shellcheck disable=SC2086  # a word each
  pip install --no-index --find-links wheels --no-deps --target "$site" $missing mlperf-logging
fi
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import mlperf_logging, pydantic, psutil, cpuinfo, pynvml, rich, pytest, sklearn' || {
  echo "error: the interpreter lacks a package; systems/gpu_day.sh wheels, see its first lines" >&2
  exit 2
}
"$python" -m common.measure.gpu_day --output "${OUT:-results/throughput/gpu_day}" "$@"
