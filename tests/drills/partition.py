"""A drill: 30 seconds without a network between the hosts that train and those that roll out.

Each host is a network namespace on a bridge, with a process table of its own and Ray's daemons in it. The first one has
the trainer, the driver and Ray's head; the cable of the one that rolls out is pulled, and put back. A third host is
spare, and its cable stays. Whoever loses Ray's daemons starts them again, as a supervisor of real hosts does.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from libra_jax import protocols
from libra_jax.cluster import guard
from tests.drills import blows, clusters, judging, network_hosts, processes, runs, settings

CUT_SECONDS = 30.0
_PORT = 6379
_LOOK_SECONDS = 0.5
_STORE = 100 << 20
_STARTED = "Ray runtime started"


def drill(plan: runs.Plan) -> Iterator[judging.Outcome]:
    """One partition."""
    if lacking := network_hosts.missing():
        yield judging.Outcome("partition", skipped=f"this machine lacks {', '.join(lacking)}")
        return
    yield blows.carried_out("partition", lambda family: _parted(plan, family))


def _parted(plan: runs.Plan, family: processes.Family) -> blows.Blow:
    with tempfile.TemporaryDirectory(prefix="libra-drill-") as folder, contextlib.ExitStack() as stack:
        _, hosts = stack.enter_context(network_hosts.running(Path(folder), settings.HOSTS["narrow"] + 1))
        cluster = stack.enter_context(_Cluster(hosts, Path(folder)))
        run = runs.Run(plan, "partition", "narrow", prefix=cluster.at_head(sys.executable))
        stack.callback(run.kill)
        cluster.start(run)
        blow = blows.at_random_moment(
            run, plan, random.Random(f"{plan.seed} partition"), r"Engine rollout-\d was lost|cannot be reached"
        )
        (rollout,) = [host for host in hosts if host.name == run.hosts()[-1]["node"]]
        rollout.plug(False)
        blow.land(f"{rollout.name}, which rolls out: no network for {CUT_SECONDS:g} s")
        plan.say(f"partition: {blow.hit} {blow.when}")
        healing = stack.enter_context(Healing(rollout, CUT_SECONDS))
        blow.follow(lambda: cluster.start(run))
        if blow.ended_seconds is None and healing.awaited:
            blow.also.append(f"the run was over before the {CUT_SECONDS:g} s")
        blow.left = clusters.actors_left(family)
    return blow


class Healing:
    """A context manager: the host gets its network back after so many seconds, which leaving the block waits for.

    Raises:
      LibraError: on leaving it, if the network did not come back; with what else went wrong, which may come of that.
    """

    def __init__(self, host: network_hosts.Host, seconds: float) -> None:
        self._host = host
        self._failed: list[protocols.LibraError] = []
        self._timer = threading.Timer(seconds, self._heal)

    def __enter__(self) -> Healing:
        self._timer.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._timer.join()
        if self._failed:
            told = "; ".join(str(each) for each in (*self._failed, error) if each is not None)
            raise protocols.LibraError(f"{self._host.name} did not get its network back: {told}")

    @property
    def awaited(self) -> bool:
        """Whether there is still no network."""
        return self._timer.is_alive()

    def _heal(self) -> None:
        try:
            self._host.plug(True)
        except protocols.LibraError as error:
            self._failed.append(error)


class _Cluster:
    """Ray's daemons on each of the hosts, started again whenever they end; all of it ends with the block."""

    def __init__(self, hosts: Sequence[network_hosts.Host], folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._address = f"{hosts[0].address}:{_PORT}"
        self._environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._guards: list[guard.Guard] = []

    def __enter__(self) -> _Cluster:
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        try:
            for number, host in enumerate(self._hosts):
                self._keepers.append(self._keep(number, host))
                self._wait(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.kill()
        for keeper, watching in zip(self._keepers, self._guards, strict=True):
            keeper.wait()
            watching.fire(runs.END_SECONDS)

    def at_head(self, *command: str) -> list[str]:
        """Runs a command on the first host."""
        (first,) = psutil.Process(self._keepers[0].pid).children()
        return self._hosts[0].beside(first.pid, *runs.IN_ROOT, *command)

    def start(self, run: runs.Run) -> None:
        """Starts a run there."""
        run.start(self._environment, f"--config.cluster.address={self._address}")

    def _keep(self, number: int, host: network_hosts.Host) -> subprocess.Popen[bytes]:
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false"]
        ray = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            f"--node-ip-address={host.address}",
            f"--node-name={host.name}",
            "--num-cpus=1",
            f"--temp-dir={self._folder / str(number)}",
            f"--object-store-memory={_STORE}",
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            "--include-log-monitor=false",
            *(head if number == 0 else [f"--address={self._address}"]),
        ]
        loop = 'while :; do "$@"; sleep 1; done'
        with self._log(number).open("wb") as log:
            keeper = subprocess.Popen(
                host.command("sh", "-c", loop, "sh", *ray),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        self._guards.append(guard.Guard([keeper.pid]))
        return keeper

    def _wait(self, number: int) -> None:
        deadline = time.monotonic() + clusters.UP_SECONDS
        while _STARTED not in (said := self._log(number).read_text(errors="replace")):
            if self._keepers[number].poll() is not None or time.monotonic() > deadline:
                raise runs.Stuck(f"Ray did not start on {self._hosts[number].name}: {' '.join(said.split())[-300:]}")
            time.sleep(_LOOK_SECONDS)

    def _log(self, number: int) -> Path:
        return self._folder / f"ray-{number}.log"
