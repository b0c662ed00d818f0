# Sourced: creates .venv and installs this project with the named extras; again only when the two files below change.
unset PYTHONDONTWRITEBYTECODE  # compiled modules are kept: without them each start of ttt takes 9 s more
stamp=".venv/installed-$1"
if ! cat pyproject.toml .ci/constraints.txt | cmp -s - "$stamp"; then
  for python in python3 python3.13 python3.12 python3.11 none; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
  done
  [ "$python" != none ] || { echo "error: Python 3.11 or newer is needed and none was found" >&2; exit 2; }
  echo "setting up .venv with $("$python" --version): a few minutes, about 6 GB (PyTorch with its CUDA libraries)"
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[$1]" --constraint .ci/constraints.txt
  cat pyproject.toml .ci/constraints.txt > "$stamp"
fi
