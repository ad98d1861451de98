#!/usr/bin/env bash
# Lint, types, import rules, documentation, tests: what CI runs. Where bubblewrap cannot run, tests of sandboxes are skipped;
# LIBRA_JAX_REQUIRE_SANDBOX=1 makes that a failure. Further arguments go to pytest:
#   bash launch/test.sh -m "not slow"
#   bash launch/test.sh --drills        # the longer whole runs, too, of which something is killed or cut off
#   bash launch/test.sh --accelerators  # also compiles for H100 and TPU, after installing the compilers (1.1 GB)
#   bash launch/test.sh --accelerators=h100  # also compiles one case for H100 (0.4 GB)
#   bash launch/test.sh --hypothesis-profile=explore   # property tests draw other examples each time
#   XLA_FLAGS= bash launch/test.sh      # compiles as users do; without, XLA optimises less and compiles in half the time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# An engine's processes import thousands of modules each: compiled once, they start in a fraction of the time.
export PYTHONDONTWRITEBYTECODE=
accelerators=()
for argument in "$@"; do
  case $argument in --accelerators*) accelerators=("$argument") ;; esac
done
bash launch/setup.sh --dev --quiet "${accelerators[@]}"
export PATH="$PWD/.venv/bin:$PATH"
echo "== ruff"
ruff check .  # a line of its own: inside && a failure would not end the script
ruff format --check .
echo "== mypy and import-linter, documentation beside them"
mkdir -p build
# -n warns of links that lead nowhere, -W ends on any warning, -E reads pages that did not change as well.
sphinx-build -E -W --keep-going -n -q -b html docs build/docs >build/docs.log 2>&1 &
documentation=$!
trap 'kill "$documentation" 2>/dev/null || true' EXIT
mypy
lint-imports --no-cache
wait "$documentation" || { cat build/docs.log && exit 1; }
trap - EXIT
echo "== pytest" && exec python -m pytest -n 3 --dist loadgroup "$@"
