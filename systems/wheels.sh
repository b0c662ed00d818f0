#!/usr/bin/env bash
# What the suite needs beside torch, torchvision and transformers, for a machine without network:
#   systems/wheels.sh fetch 3.12     on one with network: wheels/ for the Python of the other one, 50 MB
#   systems/wheels.sh install DIR    there: into DIR, for PYTHONPATH, what $PYTHON (python3) lacks of it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
needed=(pydantic psutil py-cpuinfo nvidia-ml-py rich jinja2 PyYAML pytest scikit-learn google-crc32c)
pip() { PIP_BREAK_SYSTEM_PACKAGES=1 "${PYTHON:-python3}" -m pip --disable-pip-version-check --quiet "$@"; }
if [ "${1:-}" = fetch ] && [ -n "${2:-}" ]; then
  target=(--only-binary=:all: --python-version "$2" --dest wheels)
  for name in _2_28 _2_27 _2_17 _2_12 _2_5 2014 1; do target+=(--platform "manylinux${name}_x86_64"); done
  pip download "${target[@]}" --constraint .ci/constraints.txt "${needed[@]}"
  pip download "${target[@]}" --constraint .ci/constraints.txt --no-deps mlperf-logging  # whose checkers want pandas
  rm -f wheels/numpy-*.whl  # a machine with torchvision has numpy already
elif [ "${1:-}" = install ] && [ -n "${2:-}" ]; then
  [ -d wheels ] || { echo "error: no wheels/ here: make it with 'fetch' on a machine with network" >&2; exit 2; }
  folder="$2" && mkdir -p "$folder"
  pip install --dry-run --no-index --find-links wheels --report "$folder/report.json" "${needed[@]}"
  pins='import json, sys; [print("{name}=={version}".format(**each["metadata"])) for each in json.load(sys.stdin)["install"]]'
  mapfile -t missing < <("${PYTHON:-python3}" -c "$pins" < "$folder/report.json")
  pip install --no-index --find-links wheels --no-deps --target "$folder" "${missing[@]}" mlperf-logging
else
  echo "usage: systems/wheels.sh fetch PYTHON_VERSION | install DIR" >&2
  exit 2
fi
