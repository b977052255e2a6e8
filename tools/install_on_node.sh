#!/usr/bin/env bash
# Install ray_pipe with its native core on this node, from the source that `ray up` put beside this
# script. Does nothing if that source is installed already; safe to run again at any time.
#   RAY_PIPE_PYTHON    interpreter for the environment (default python3; 3.11 or newer)
#   RAY_PIPE_PIP_ARGS  more words for pip, such as --find-links FOLDER on nodes without internet
set -euo pipefail
cd "$(dirname "$0")/.."
venv="$HOME/ray_pipe_venv"

test -x "$venv/bin/python" || "${RAY_PIPE_PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -c 'import sys; assert sys.version_info >= (3, 11), sys.version' || {
  echo "ray_pipe needs Python 3.11 or newer on this node: set RAY_PIPE_PYTHON, remove $venv" >&2
  exit 1
}

digest=$(find pyproject.toml constraints.txt ray_pipe stages compressors netsim native -type f \
  -not -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum | sha256sum)
if [ "$(cat "$venv/ray_pipe_source" 2>/dev/null)" != "$digest" ]; then
  rm -f "$venv/ray_pipe_source"
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pip install --quiet --force-reinstall --no-deps ${RAY_PIPE_PIP_ARGS:-} .
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pip install --quiet -c constraints.txt ${RAY_PIPE_PIP_ARGS:-} \
    $("$venv/bin/python" - <<'PY'
import tomllib
print(*(word.replace(" ", "") for word in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))
PY
)
fi
cd /  # what is installed counts, not what lies here
"$venv/bin/python" -c '
from compressors import kernels
assert kernels.core() == "native", "the native core was not built; is there a C++ compiler?"'
echo "$digest" >"$venv/ray_pipe_source"
echo "ray_pipe is installed on $(hostname)"
