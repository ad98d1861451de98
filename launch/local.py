"""Runs a command on hosts that are emulated on this machine: the same run over several hosts, without a cluster.

  python launch/local.py --hosts=4 --accelerators_per_host=1 -- launch/train.py --config=configs/quickstart.py \\
    --config.trainer.data=2 --config.trainer.processes=2 --config.rollout.tensor_parallel=1,1

Each host is a Ray node with an address of its own on the loopback network. A script after `--` gets the hosts by
flags (`--config.cluster.backend`, `.address` and `.accelerators_per_host`); any other command gets them by
RAY_ADDRESS. Hosts end with the command or this script, even if these are killed. --kill_host=3 --kill_after=60 cuts
a host's power during the run.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from support import cli

from absl import flags

from libra_jax import protocols
from libra_jax.cluster import emulated, guard
from libra_jax.cluster import hosts as layouts

_HOSTS = flags.DEFINE_integer("hosts", 2, "Hosts; more than the run takes are spare.", lower_bound=1)
_EACH = flags.DEFINE_integer(
    "accelerators_per_host", 1, "Accelerators of each host; CPU cores stand for them.", lower_bound=1
)
_TRAIN = flags.DEFINE_integer(
    "train_hosts",
    None,
    "Number of the first hosts that only train; the others only roll out. Default: any host does either.",
)
_START = flags.DEFINE_float("start_seconds", 120.0, "Deadline for the hosts to be up.", lower_bound=1.0)
_KILL = flags.DEFINE_integer("kill_host", None, "Host that loses its power; 0 has the command and Ray's head.")
_AFTER = flags.DEFINE_float("kill_after", 60.0, "Seconds from the command's start until it does.", lower_bound=0.0)


def main(command: Sequence[str]) -> int:
    if not command:
        raise protocols.ConfigError(
            "no command to run on the hosts; give it after --, as in `launch/local.py --hosts=4 -- launch/train.py`"
        )
    if not (Path(command[0]).is_file() if command[0].endswith(".py") else shutil.which(command[0])):
        raise protocols.ConfigError(f"{command[0]}, the command after --, is neither a script nor a program")
    if _KILL.value is not None and not 0 <= _KILL.value < _HOSTS.value:
        raise protocols.ConfigError(f"--kill_host={_KILL.value}: the hosts are 0 to {_HOSTS.value - 1} (--hosts)")
    train, roles = _TRAIN.value, dict[int, layouts.Role]()
    if train is not None:
        if not 0 < train < _HOSTS.value:
            raise protocols.ConfigError(
                f"--train_hosts={train}: some of the {_HOSTS.value} hosts train and some roll out (--hosts)"
            )
        roles = {number: "training" if number < train else "rollout" for number in range(_HOSTS.value)}
    with emulated.EmulatedHosts(_HOSTS.value, accelerators=_EACH.value, seconds=_START.value, roles=roles) as hosts:
        up = f"{_HOSTS.value} host{'s are' if _HOSTS.value > 1 else ' is'} up; Ray's head is at {hosts.address}."
        print(f"local: {up}", file=sys.stderr, flush=True)
        return _run(told(command, hosts.address, _EACH.value), hosts)


def told(command: Sequence[str], address: str, each: int) -> list[str]:
    """Returns the command. A script gets flags that name the hosts, except those that it already has."""
    if not command[0].endswith(".py"):
        return list(command)
    settings = {"backend": "ray", "address": address, "accelerators_per_host": each}
    flags_of_ours = {f"--config.cluster.{name}": value for name, value in settings.items()}
    given = {word.partition("=")[0] for word in command}
    added = [f"{name}={value}" for name, value in flags_of_ours.items() if name not in given]
    return [sys.executable, *command, *added]


def _run(command: Sequence[str], hosts: emulated.EmulatedHosts) -> int:
    """Runs the command to its end; returns its exit status, as a shell does.

    Passes SIGTERM on to the command, which may end in its own way. Ctrl-C reaches the command from the terminal, as
    it reaches this script.
    """
    running = subprocess.Popen(command, env={**os.environ, **hosts.environment})
    # First of all: the command may have begun to work before the guard is up.
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: running.terminate()),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
    }
    # Ends the command even if this script is killed.
    watching = guard.Guard([running.pid])
    timer = threading.Timer(_AFTER.value, _cut_power, (hosts, _KILL.value, running))
    timer.daemon = True
    if _KILL.value is not None:
        timer.start()
    try:
        status = running.wait()
    finally:
        timer.cancel()
        if timer.is_alive():  # a host must not end while all hosts are being ended
            timer.join()
        for number, handler in before.items():
            signal.signal(number, handler)
        watching.fire(10.0)
    return status if status >= 0 else 128 - status


def _cut_power(hosts: emulated.EmulatedHosts, number: int, command: subprocess.Popen[bytes]) -> None:
    print(f"local: host-{number} loses its power.", file=sys.stderr, flush=True)
    if number == 0:  # the command runs on host 0
        command.kill()
    hosts.kill(number)


if __name__ == "__main__":
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    sys.argv, words = sys.argv[:cut], sys.argv[cut + 1 :]
    cli.run(functools.partial(main, words), interrupted="interrupted; the hosts have ended.")
