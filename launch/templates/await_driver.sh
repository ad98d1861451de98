# shellcheck shell=bash
# Waits until the run's driver has ended, for LIBRA_JAX_GRACE seconds at most: a checkpoint needs the hosts of the
# trainer, so they go last.
set -u

for ((half = 0; half < 2 * LIBRA_JAX_GRACE; half++)); do
  [ -e "$LIBRA_JAX_WORKDIR/.driver" ] || exit 0
  sleep 0.5
done
