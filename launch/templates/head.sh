# shellcheck shell=bash
# The head of a JobSet: Ray's, which takes no accelerator, and the driver.
set -eu

rm -f "$LIBRA_JAX_WORKDIR/.driver" # of an attempt that was killed
ray start --head --port=6379 --num-gpus=0 --include-dashboard=false --disable-usage-stats
exec bash launch/templates/run_driver.sh
