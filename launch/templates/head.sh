# shellcheck shell=bash
# The head of a JobSet: Ray's, which takes no accelerator, and the driver, once LIBRA_JAX_HOSTS hosts have joined.
set -eu

trap 'exit 75' TERM
rm -f "$LIBRA_JAX_WORKDIR/.driver" # of an attempt that was killed
ray start --head --port=6379 --num-gpus=0 --include-dashboard=false --disable-usage-stats
python launch/templates/await_hosts.py "$LIBRA_JAX_HOSTS"
exec bash launch/templates/run_driver.sh
