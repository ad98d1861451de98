# shellcheck shell=bash
# A host of a JobSet: joins the Ray of its head, LIBRA_JAX_HEAD, and stays until the driver has ended.
set -u

trap 'exit 75' TERM
SECONDS=0
# shellcheck disable=SC2016 # the inner bash expands it
until timeout 5 bash -c 'exec 3<>"/dev/tcp/$LIBRA_JAX_HEAD/6379"' 2>/dev/null; do
  if ((SECONDS > 600)); then
    echo "the head $LIBRA_JAX_HEAD did not answer within 600 s" >&2
    exit 1
  fi
  sleep 2
done

labels=${LIBRA_JAX_LABELS:-} # what its group is for, if it is for one thing
ray start --address="$LIBRA_JAX_HEAD:6379" ${labels:+"--labels=$labels"} --disable-usage-stats --block &
ray=$!
# Told to end, Ray would first ask its head, which is gone by then, for 30 s; what it started ends with the container.
trap 'bash launch/templates/await_driver.sh; kill -KILL "$ray" 2>/dev/null' TERM
wait "$ray"
status=$?
while kill -0 "$ray" 2>/dev/null; do # the trap ended the wait, not Ray
  wait "$ray"
  status=$?
done
# Ray ends with its head. While the driver runs, it is this host that failed.
if [ -e "$LIBRA_JAX_WORKDIR/.driver" ]; then exit "$status"; fi
exit 0
