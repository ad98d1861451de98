#!/usr/bin/env bash
# shellcheck disable=SC2029 # variables in the commands of hosts are meant to be read here
set -euo pipefail
name=mine
project=lab
zone=us-east5-b
accelerator_type=v6e-8
runtime_version=v2-alpha-tpuv6e
hosts=2
wait_seconds=43200
repository=libra-jax
setup='git -C libra-jax pull'
delete=''
create=(
  --spot
  --labels=team=rl
)
rollout_hosts=(
  gpu-0
)
command=(
  python
  launch/train.py
  --config=configs/qwen3_1p7b_8gpu.py
  --config.cluster.accelerators_per_host=4
  --config.cluster.address=auto
  --config.cluster.backend=ray
  --config.trainer.fsdp=8
  --config.trainer.platform=tpu
  --config.trainer.processes=2
  --config.trainer.rows_per_micro_batch=8
  --workdir=/shared/mine
)

# A run whose trainer is a pod of Cloud TPU VMs, and whose rollout is on other hosts: asks for the pod, joins all hosts
# by Ray, and runs the driver on the pod's first. Started again, it goes on where it was.

tpus() { gcloud compute tpus "$@" --project="$project" --zone="$zone"; }
worker() { tpus tpu-vm ssh "$name" --worker="$1" --command="$2"; }
address() { tpus tpu-vm describe "$name" --format='value(networkEndpoints[0].ipAddress)'; }
state() { tpus queued-resources describe "$name" --format='value(state.state)' 2>/dev/null; }

echo "Asking for $name, $accelerator_type in $zone ..." >&2
if [ -z "$(state)" ]; then
  tpus queued-resources create "$name" --node-id="$name" --accelerator-type="$accelerator_type" \
    --runtime-version="$runtime_version" "${create[@]}"
fi

joined=() # hosts on which there is a Ray of ours, or its token: the pod's by number, the others by name
finish() { # runs at any end, and keeps the run's status
  local host leave="cd $repository && .venv/bin/ray stop --grace-period 20; rm -f ~/.ray/auth_token"
  for host in "${joined[@]}"; do
    case $host in
    [0-9]*) if [ -z "$delete" ]; then worker "${host%:*}" "$leave" || echo "Ray may still run on host $host" >&2; fi ;;
    *) ssh "${host#ssh:}" "$leave" || echo "Ray may still run on ${host#ssh:}" >&2 ;;
    esac
  done
  if [ -n "$delete" ]; then
    tpus queued-resources delete "$name" --force --quiet || echo "$name may still be asked for" >&2
  fi
}
trap finish EXIT
SECONDS=0
until [ "$(state)" = ACTIVE ]; do
  case "$(state)" in
  FAILED | SUSPENDED)
    echo "$name is $(state); see gcloud compute tpus queued-resources describe $name" >&2
    exit 1
    ;;
  esac
  if ((SECONDS > wait_seconds)); then
    echo "$name was not given out within $wait_seconds s; it stays asked for" >&2
    exit 1
  fi
  sleep 20
done

worker 0 true # the first time, gcloud makes a key, and may ask for a passphrase: not where the token goes in
if [ -n "$setup" ]; then
  worker all "$setup"
  for host in "${rollout_hosts[@]}"; do ssh "$host" "$setup"; done
fi

echo "Joining $hosts hosts of the pod and 1 of rollout ..." >&2
# Anyone who reaches Ray could run code in it: every peer shows this token, which travels by standard input alone.
token=$(openssl rand -hex 32)
store='umask 077; mkdir -p ~/.ray; cat >~/.ray/auth_token'
start="cd $repository && export RAY_AUTH_MODE=token && .venv/bin/ray stop --grace-period 20 && .venv/bin/ray start"
for ((host = 0; host < hosts; host++)); do
  joined+=("$host:pod")
  worker "$host" "$store" <<<"$token"
done
for host in "${rollout_hosts[@]}"; do
  joined+=("ssh:$host")
  ssh "$host" "$store" <<<"$token"
done
head="$(address):6379"
trains="--labels=libra-role=training" serves="--labels=libra-role=rollout"
worker 0 "$start --head --port=6379 --include-dashboard=false --disable-usage-stats $trains"
for ((host = 1; host < hosts; host++)); do worker "$host" "$start --address=$head --disable-usage-stats $trains"; done
for host in "${rollout_hosts[@]}"; do ssh "$host" "$start --address=$head --disable-usage-stats $serves"; done

driver="cd $repository && export RAY_AUTH_MODE=token && exec .venv/bin/$(printf '%q ' "${command[@]}")"
# With a terminal there, Ctrl-C reaches the driver.
gcloud compute tpus tpu-vm ssh "$name" --project="$project" --zone="$zone" --worker=0 --command="$driver" -- -t
