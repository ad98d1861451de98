"""Emulated hosts as drills have them: they outlive a run, and are started again where their head is lost."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

from libra_jax.cluster import emulated
from tests.drills import processes, runs

UP_SECONDS = 300.0
"""For hosts to be up, on a machine with much else to do."""


class Cluster:
    """A context manager: runs that are started in it have ended with it, and so have the hosts.

    Args:
      count: hosts.
      environment: of single hosts, as `emulated.EmulatedHosts` takes it.
    """

    def __init__(self, count: int, environment: Mapping[int, Mapping[str, str]] | None = None) -> None:
        self._count = count
        self._environment = environment
        self.hosts = self._make()
        self._up = False
        self._runs: list[runs.Run] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            run.kill()
        self._end()

    def start(self, run: runs.Run, environment: Mapping[str, str] | None = None) -> None:
        """Starts a run on them, with further environment variables."""
        if self._up and not self.hosts.lives(0):
            self._end()
            self.hosts = self._make()
        if not self._up:
            self.hosts.__enter__()
            self._up = True
        self._runs.append(run)
        run.start({**self.hosts.environment, **(environment or {})}, f"--config.cluster.address={self.hosts.address}")

    def _make(self) -> emulated.EmulatedHosts:
        return emulated.EmulatedHosts(self._count, environment=self._environment, seconds=UP_SECONDS)

    def _end(self) -> None:
        if self._up:
            self.hosts.end()
        self._up = False


def actors_left(family: processes.Family) -> tuple[str, ...]:
    """Names of actors that live on although their run has ended and their hosts have not."""
    deadline = time.monotonic() + processes.END_SECONDS
    while found := [process for process in family.alive() if _of_a_run(process)]:
        if time.monotonic() > deadline:
            return tuple(f"{processes.name(process)} ({process.pid}), while its host lived," for process in found)
        time.sleep(processes.LOOK_SECONDS)
    return ()


def _of_a_run(process: psutil.Process) -> bool:
    return any(mark in processes.name(process) for mark in ("ray::RayHost", "EngineCore", "bwrap"))
