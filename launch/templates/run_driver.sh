# shellcheck shell=bash
# Runs the driver of a run, in Kubernetes, and says in the workdir that it runs: hosts that are told to go wait for it.
#   LIBRA_JAX_COMMAND  the driver's program and arguments, a line each
#   LIBRA_JAX_WORKDIR  folder of the run
# Told to end (SIGTERM), it tells the driver, which checkpoints; 75 is then the answer: not finished, start it again.
set -u

mapfile -t command <<<"$LIBRA_JAX_COMMAND"
mkdir -p "$LIBRA_JAX_WORKDIR" || exit 1
running="$LIBRA_JAX_WORKDIR/.driver"

told=
driver=
trap 'told=1; if [ -n "$driver" ]; then kill -TERM "$driver" 2>/dev/null; fi' TERM INT
echo "$$ $HOSTNAME" >"$running"
"${command[@]}" --workdir="$LIBRA_JAX_WORKDIR" &
driver=$!
if [ -n "$told" ]; then kill -TERM "$driver" 2>/dev/null; fi

wait "$driver"
status=$?
while kill -0 "$driver" 2>/dev/null; do # the trap ended the wait, not the driver
  wait "$driver"
  status=$?
done
# A driver that has taken the workdir over says so there, and that stays.
if [ "$(cat "$running" 2>/dev/null)" = "$$ $HOSTNAME" ]; then rm -f "$running"; fi
if [ -n "$told" ]; then exit 75; fi
exit "$status"
