#!/usr/bin/env bash
# Makes the virtual environment .venv with everything pinned in third_party/cpu; quick when it is already there.
# `bash launch/setup.sh --dev` adds the tools of the test command. quickstart.sh and test.sh call it with --quiet.
set -euo pipefail
dev= quiet=
for argument in "$@"; do
  case $argument in
    --dev) dev=1 ;;
    --quiet) quiet=1 ;; # says nothing at the end: the caller goes on
    *)
      echo "usage: bash launch/setup.sh [--dev] [--quiet], not $argument" >&2
      exit 2
      ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset LIBRA_JAX_COMPILE  # an editable install must follow its source, which a compiled scheduler would not

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Libra-JAX needs Python 3.11 or newer; $("$python" --version) was found. Point PYTHON at a newer one." >&2
  exit 1
}
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || {
  echo "The CPU pins are for Linux on x86_64; see third_party/README.md for other platforms." >&2
  exit 1
}

# A stamp holds the digest of what was installed, so that a second call costs milliseconds and a changed pin is noticed.
install_lock() { # name, lock file
  local stamp=".venv/.installed-$1" digest
  digest=$(cat "$2" setup.py | sha256sum | cut -d' ' -f1)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ] && return 0
  echo "Installing $2 into .venv (once; the first time takes about three minutes) ..." >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r "$2" \
    2> >(grep -v '^WARNING: Location' >&2)
  echo "$digest" >"$stamp"
  installed+=" $2"
}
installed=

# pip comes last into a new environment, so one without it was interrupted half-way.
[ -x .venv/bin/pip ] || "$python" -m venv --clear .venv
install_lock cpu third_party/cpu/lock.txt
if [ -n "$dev" ]; then
  install_lock dev third_party/cpu/lock_dev.txt
fi
# Programs of the system's, without which the rest works. Asked once.
apt() { DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq "$@" >/dev/null 2>&1; }
ask_for() { # program, what is said where it cannot be had, packages
  local program=$1 otherwise=$2 stamp=".venv/.asked-$3"
  shift 2
  { [ -f "$stamp" ] || PATH=$PATH:/usr/sbin command -v "$program" >/dev/null; } && return 0
  touch "$stamp"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing $* ..." >&2
    apt install -y --no-install-recommends "$@" ||
      { apt update && apt install -y --no-install-recommends "$@"; } || true
  fi
  PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || echo "$otherwise, e.g. with apt-get install $*." >&2
}
ask_for bwrap "Sandboxed tools need bubblewrap, which is missing: install it" bubblewrap
if [ -n "$dev" ]; then
  ask_for slurmctld "Tests on a Slurm of one node are skipped without it: install it" slurmctld slurmd slurm-client munge
fi
if [ ! -f .venv/.installed-package ] || [ setup.py -nt .venv/.installed-package ]; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . \
    2> >(grep -v '^WARNING: Location' >&2)
  touch .venv/.installed-package
fi
if [ -z "$quiet" ]; then
  if [ -n "$installed" ]; then
    echo "Set up: .venv holds Libra-JAX and what$installed pins${dev:+, the tools of the test command included}."
  else
    echo "Nothing to do: .venv holds Libra-JAX and all that is pinned${dev:+, the tools of the test command included}."
  fi
  echo "Next, one of:"
  if [ -n "$dev" ]; then
    echo "  bash launch/test.sh            # lint, types, import rules, tests"
  fi
  echo "  bash launch/quickstart.sh      # trains a small agent that visibly learns"
  echo "  source .venv/bin/activate      # then python launch/train.py and the other commands of README.md"
fi
