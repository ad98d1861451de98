#!/usr/bin/env bash
# Makes the virtual environment of an agent whose pins conflict with ours: `bash launch/harness.sh mini_swe_agent` makes
# .venv/harness-mini_swe_agent from third_party/harnesses/mini_swe_agent.txt. A config names its interpreter
# (task.environment_arguments.python). LIBRA_JAX_HARNESSES names another folder than .venv. The names clients, clients_2,
# aider and javascript are those of tests/harness/test_client_drill.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
names=$(cd third_party/harnesses && ls -- *.txt *.json | sed 's/\.[a-z]*$//' | sort | paste -sd' ')
[ $# = 1 ] && [ -f "third_party/harnesses/$1.txt" -o -f "third_party/harnesses/$1.json" ] || {
  echo "usage: bash launch/harness.sh NAME, where NAME is one of: $names" >&2
  exit 2
}
if [ -f "third_party/harnesses/$1.json" ]; then # JavaScript packages, by npm
  folder=${LIBRA_JAX_HARNESSES:-.venv}/harness-$1
  mkdir -p "$folder"
  cp "third_party/harnesses/$1.json" "$folder/package.json"
  npm install --prefix "$folder" --no-audit --no-fund --no-package-lock --loglevel=error >&2
  echo "Set up: the commands are in $folder/node_modules/.bin."
  exit 0
fi
python=${PYTHON:-python3} lock=third_party/harnesses/$1.txt venv=${LIBRA_JAX_HARNESSES:-.venv}/harness-$1
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "The pins are for Python 3.11 or newer; $("$python" --version) was found. Point PYTHON at a newer one." >&2
  exit 1
}
# The stamp holds the digest of the pins, and comes last: an environment without it was interrupted half-way.
digest=$(sha256sum <"$lock" | cut -d' ' -f1) stamp=$venv/.installed
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$digest" ]; then
  echo "Installing $lock into $venv (once; about a minute) ..." >&2
  "$python" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r "$lock" \
    2> >(grep -v '^WARNING: Location' >&2)
  echo "$digest" >"$stamp"
fi
echo "Set up: name $venv/bin/python in task.environment_arguments.python."
