# shellcheck shell=bash
# Tells the driver on this host to checkpoint and end, and waits until it has: Kubernetes runs this before it ends the
# head of a RayJob, where SIGTERM would go to Ray, and from there to no one.
set -u

running="$LIBRA_JAX_WORKDIR/.driver"
read -r process host 2>/dev/null <"$running" || exit 0
[ "$host" = "$HOSTNAME" ] || exit 0
kill -TERM "$process" 2>/dev/null || exit 0
for ((half = 0; half < 2 * LIBRA_JAX_GRACE; half++)); do
  [ -e "$running" ] && kill -0 "$process" 2>/dev/null || exit 0
  sleep 0.5
done
