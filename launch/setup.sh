#!/usr/bin/env bash
# Makes the virtual environment .venv with everything pinned in third_party/cpu; quick when it is already there.
# `bash launch/setup.sh --dev` adds the tools of the test command. quickstart.sh and test.sh call it with --quiet.
# `--cuda` makes .venv-cuda in its place, from third_party/cuda, for NVIDIA GPUs.
# `--accelerators` adds the compilers for H100 and TPU (launch/compile.py), `--accelerators=h100` or `=v6e` one of them.
set -euo pipefail
dev= quiet= accelerators= platform=cpu venv=.venv
for argument in "$@"; do
  case $argument in
    --dev) dev=1 ;;
    --cuda) platform=cuda venv=.venv-cuda ;; # torch of both platforms has one name, so each has an environment
    --quiet) quiet=1 ;; # says nothing at the end: the caller goes on
    --accelerators) accelerators="h100 v6e" ;;
    --accelerators=h100 | --accelerators=v6e) accelerators=${argument#*=} ;;
    *)
      echo "usage: bash launch/setup.sh [--dev] [--cuda] [--quiet] [--accelerators[=h100|=v6e]], not $argument" >&2
      exit 2
      ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset LIBRA_JAX_COMPILE  # an editable install must follow its source, which a compiled scheduler would not

python=${PYTHON:-python3}
if [ $platform = cuda ] && [ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 11))')" != True ]; then
  echo "The CUDA pins are for Python 3.11; $("$python" --version) was found. Point PYTHON at Python 3.11." >&2
  exit 1
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Libra-JAX needs Python 3.11 or newer; $("$python" --version) was found. Point PYTHON at a newer one." >&2
  exit 1
}
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || {
  echo "The pins are for Linux on x86_64; see third_party/README.md for other platforms." >&2
  exit 1
}

# A stamp holds the digest of what was installed, so that a second call costs milliseconds and a changed pin is noticed.
install_lock() { # name, lock file
  local stamp="$venv/.installed-$1" digest
  digest=$(cat "$2" setup.py | sha256sum | cut -d' ' -f1)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ] && return 0
  echo "Installing $2 into $venv (once; the first time takes one to three minutes) ..." >&2
  # pip unpacks on one core. Two of them take half of the time, with every second package each.
  local half installers=()
  for half in 0 1; do
    awk -v half=$half '!/^#/ && count++ % 2 == half' "$2" >"$stamp.$half.txt"
    $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
      -r "$stamp.$half.txt" 2> >(grep -v '^WARNING: Location' >&2) &
    installers+=($!)
  done
  wait "${installers[0]}" || { wait "${installers[1]}"; exit 1; }
  wait "${installers[1]}"
  rm "$stamp".[01].txt
  echo "$digest" >"$stamp"
  installed+=" $2"
}
installed=

# pip comes last into a new environment, so one without it was interrupted half-way.
[ -x $venv/bin/pip ] || "$python" -m venv --clear "$venv"
install_lock $platform third_party/$platform/lock.txt
if [ -n "$dev" ]; then
  install_lock dev third_party/cpu/lock_dev.txt
fi
# Compilers lie in a folder of their own: a process that does not compile for accelerators never loads their plug-ins.
install_compilers() { # accelerator, pattern of its lines in the lock file
  local folder=$venv/accelerators stamp="$venv/.installed-$1" pins digest
  pins=$(grep -E "$2" third_party/accelerators/lock.txt)
  digest=$(echo "$pins" | sha256sum | cut -d' ' -f1)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ] && return 0
  echo "Installing the compiler for $1 into $folder ..." >&2
  echo "$pins" >"$stamp.txt"
  $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
    --target "$folder" -r "$stamp.txt" 2> >(grep -v '^WARNING: Location' >&2)
  echo "$digest" >"$stamp"
  installed+=" third_party/accelerators/lock.txt"
}
for accelerator in $accelerators; do
  case $accelerator in
    h100) install_compilers h100 '^jax-cuda' ;;
    v6e) install_compilers v6e '^libtpu' ;;
  esac
done
# Programs of the system's, without which the rest works. Asked once.
apt() { DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq "$@" >/dev/null 2>&1; }
ask_for() { # program, what is said where it cannot be had, packages
  local program=$1 otherwise=$2 stamp="$venv/.asked-$3"
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
if [ ! -f $venv/.installed-package ] || [ setup.py -nt $venv/.installed-package ]; then
  $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . \
    2> >(grep -v '^WARNING: Location' >&2)
  touch $venv/.installed-package
fi
if [ -z "$quiet" ]; then
  if [ -n "$installed" ]; then
    echo "Set up: $venv holds Libra-JAX and what$installed pins${dev:+, the tools of the test command included}."
  else
    echo "Nothing to do: $venv holds Libra-JAX and all that is pinned${dev:+, the tools of the test command included}."
  fi
  echo "Next, one of:"
  if [ -n "$dev" ]; then
    echo "  bash launch/test.sh            # lint, types, import rules, tests"
  fi
  if [ -n "$accelerators" ]; then
    echo "  python launch/compile.py --config=configs/qwen3_1p7b_8gpu.py --target=${accelerators%% *}"
  fi
  if [ $platform = cpu ]; then
    echo "  bash launch/quickstart.sh      # trains a small agent that visibly learns"
  fi
  echo "  source $venv/bin/activate      # then python launch/train.py and the other commands of README.md"
fi
