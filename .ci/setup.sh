# Sourced: creates .venv and installs this project with the named extras, once per version of the two files below.
stamp=".venv/installed-$1"
if ! cat pyproject.toml .ci/constraints.txt | cmp -s - "$stamp"; then
  python="$(command -v python3.13 || command -v python3.12 || command -v python3.11 || command -v python3)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python >= 3.11 is needed, found $("$python" --version)" >&2; exit 2; }
  echo "setting up .venv (a few minutes, about 6 GB: PyTorch with its CUDA libraries) ..."
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$1]" --constraint .ci/constraints.txt
  cat pyproject.toml .ci/constraints.txt > "$stamp"
fi
