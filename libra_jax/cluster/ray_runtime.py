"""Ray itself: started for this process or joined by address, and ended without leftovers.

If the process that started Ray is killed with -9, Ray 2.60 ends its own processes at once, by parent-death signal. Its
workers end about two seconds later, but its two agents live on for a minute. A guard kills these agents and removes
Ray's directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pathlib
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator

import grpc
import psutil
import ray
import ray.exceptions
from ray._private import ray_constants

from libra_jax.cluster import actors, granted, guard
from libra_jax.protocols import ConfigError, DeadlineMissed, LibraError
from libra_jax.utils import scratch

_log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds between two probes of a joined cluster's head, and for one probe."""

SILENT_SECONDS = 20.0
"""Seconds without an answer of the head before the warning. Ray ends the driver after 60."""

_LONGEST_TEMPORARY = 14  # our directories and Ray's socket in them add 93 characters, and the kernel allows 107
_REACH_SECONDS = 5.0
_NODE_SECONDS = 10.0  # for a node of this machine that is being started at the same time
_PLENTY_OF_CPUS = 1024.0  # if embedded, CPU reservations order nothing: even two cores must hold every actor


class RayRuntime:
    """Ray as this process uses it. One thread runs every call that may block.

    That thread lives as long as the runtime. The parent-death signal of Ray's processes is bound to the thread that
    started them, not to the process.
    """

    def __init__(self, address: str, *, object_store_mib: int, start_seconds: float, hosts: bool = True) -> None:
        """Starts nothing yet. `hosts`: the run is laid out over hosts, so the cluster may have several."""
        self._address = address
        self._hosts = hosts
        self._object_store_bytes = object_store_mib << 20
        self._start_seconds = start_seconds
        self._thread: actors.ActorThread | None = None
        self._guard: guard.Guard | None = None
        self._directory = ""
        self._lock = asyncio.Lock()
        self._started: asyncio.Future[None]
        self._watching: asyncio.Task[None] | None = None  # watches the head of a joined cluster

    async def ensure(self) -> None:
        """Starts or joins Ray, once. A Ray that this process already has is used, and not ended later.

        Raises:
          ConfigError: no cluster answers at the address; or it has several hosts, and the run is not laid out over
            hosts.
          LibraError: Ray does not start.
          DeadlineMissed: Ray neither started nor failed in time.
        """
        async with self._lock:
            if self._thread is None:
                # Started by the program that uses this package, which also ends it.
                if ray.is_initialized():
                    return
                self._thread = actors.ActorThread("ray")
                self._started = self._thread.submit("start", self._join if self._address else self._start)
            try:
                # Shielded: a caller that is cancelled must not cancel the start for the callers after it.
                await asyncio.wait_for(asyncio.shield(self._started), self._start_seconds)
            except TimeoutError:
                where = f"the cluster at {self._address!r}" if self._address else "an embedded cluster"
                raise DeadlineMissed(
                    f"Ray did not come up with {where} within {self._start_seconds:g} s; see whether it is "
                    "overloaded, or raise config.deadlines.cluster_start"
                ) from None
            if self._address and self._watching is None:
                head = ray.get_runtime_context().gcs_address
                self._watching = asyncio.get_running_loop().create_task(watch_head(head))

    def _start(self) -> None:
        temporary = tempfile.gettempdir()
        temporary = temporary if len(temporary) <= _LONGEST_TEMPORARY else "/tmp"
        for abandoned in pathlib.Path(temporary).glob(f"{scratch.RAY_PREFIX}*-*"):
            owner = abandoned.name.removeprefix(scratch.RAY_PREFIX).split("-")[0]
            # Its guard was killed together with its process.
            if owner.isdigit() and not psutil.pid_exists(int(owner)) and scratch.is_ours(abandoned):
                shutil.rmtree(abandoned, ignore_errors=True)
        self._directory = tempfile.mkdtemp(prefix=f"{scratch.RAY_PREFIX}{os.getpid()}-", dir=temporary)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        children = functools.partial(psutil.Process().children, recursive=True)
        before = {child.pid for child in children()}
        try:
            _quieten()
            with _at_loopback():
                ray.init(
                    address="local",
                    num_cpus=int(_PLENTY_OF_CPUS),
                    object_store_memory=self._object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    # Ray opens its own directory to every user (0777); the directory above it is for this user only.
                    _temp_dir=f"{self._directory}/r",
                    _system_config=dict(guard.RAY_SETTINGS),
                )
        except Exception as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise LibraError(f"Ray did not start on this machine: {actors.summary(error)}") from error
        # All children that appeared during the start are Ray's.
        self._guard = guard.Guard(sorted({child.pid for child in children()} - before), self._directory)

    def _join(self) -> None:
        address = self._address
        if "://" in address:
            raise ConfigError(
                f'config.cluster.address: {address!r} is for Ray\'s client; give the head as "host:port", '
                "and run on a node of the cluster"
            )
        try:
            if address != "auto":
                _reach(address, min(_REACH_SECONDS, self._start_seconds))
            _wait_for_node(address, min(_NODE_SECONDS, self._start_seconds))
            _quieten()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ValueError, OSError, RuntimeError, ray.exceptions.RayError) as error:
            if "Version mismatch" in str(error):
                raise ConfigError(
                    f"config.cluster.address: {' '.join(str(error).split())}; install the same on all hosts"
                ) from error
            raise ConfigError(
                f"config.cluster.address: no Ray cluster answers at {address!r} ({actors.summary(error)}), or it asks "
                "for another token (RAY_AUTH_TOKEN_PATH); start one with `ray start --head`, or leave it empty and one "
                "is started embedded"
            ) from error
        names = {node["NodeManagerAddress"]: node["NodeName"] for node in ray.nodes() if node["Alive"]}
        if len(names) > 1 and not self._hosts:
            ray.shutdown()
            raise ConfigError(
                "config.cluster.accelerators_per_host: is 0, which puts the whole run on one host, and the Ray cluster "
                f"at {address!r} has {len(names)} ({granted.listed(names.values())}); set it to what a host has, or "
                "leave config.cluster.address empty"
            )

    async def end(self, seconds: float) -> None:
        """Leaves the cluster, or ends it if this object started it. Idempotent.

        Raises:
          DeadlineMissed: Ray did not end in time.
        """
        if self._thread is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        thread, self._thread = self._thread, None
        try:
            await asyncio.wait_for(thread.submit("shutdown", ray.shutdown), seconds)
        except TimeoutError:
            raise DeadlineMissed(f"Ray was still shutting down after {seconds:g} s; its processes are killed") from None
        finally:
            thread.close()
            if self._guard is not None:
                self._guard.fire(seconds)
                self._guard = None


async def watch_head(address: str) -> None:
    """Probes Ray's head repeatedly, and warns once each time that it falls silent. Runs until cancelled.

    The warning comes before Ray ends the driver, a minute after the head was lost. Ray 2.60 raises no exception then:
    one of its threads ends the process, with a line on standard error. Until then, calls to actors go on, because they
    need no head.

    Args:
      address: address of the head, `host:port`.
    """
    loop, (host, _, port) = asyncio.get_running_loop(), address.rpartition(":")
    answered, warned = loop.time(), False
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), LOOK_SECONDS)
            writer.close()
            answered, warned = loop.time(), False
        if not warned and loop.time() - answered >= SILENT_SECONDS:
            warned = True
            _log.warning(
                "Ray's head at %s has not answered for %.0f s. If it stays away, Ray ends this process a minute after "
                "it went; the same command, with the address of a cluster that is started again "
                "(config.cluster.address), goes on from the last checkpoint.",
                address,
                loop.time() - answered,
            )


def _reach(address: str, seconds: float) -> None:
    """Checks that a server at the address speaks Ray's protocol. Ray's own check takes minutes and cannot be stopped.

    Raises:
      ValueError: the address is malformed.
      OSError: no such server answers.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=seconds).close()
    if os.environ.get("RAY_USE_TLS", "0") != "0":  # a TLS channel would need Ray's certificates
        return
    channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
    try:
        grpc.channel_ready_future(channel).result(timeout=seconds)
    except grpc.FutureTimeoutError:
        raise ConnectionError("something else listens there") from None
    finally:
        channel.close()


def _wait_for_node(address: str, seconds: float) -> None:
    """Waits until a Ray node runs on this machine. Without a node, Ray would search for one for a minute."""
    deadline = time.monotonic() + seconds
    while not any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"])):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"config.cluster.address: this machine is no node of the cluster at {address!r}; run on one that is, "
                f"or make it one with `ray start --address={address}`"
            )
        time.sleep(0.5)


def _quieten() -> None:
    """Keeps Ray's remarks on its own start and end off the console, from now on."""
    logger = logging.getLogger("ray")
    logger.setLevel(max(logger.level, logging.ERROR))
    # Remarks on dead workers, too: our own error names the worker in one sentence.
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix=False: _log.debug(
        "ray: %s", " ".join(data.get("lines", ()))
    )


@contextlib.contextmanager
def _at_loopback() -> Iterator[None]:
    """Makes a Ray that starts in this block listen only at the loopback, including its workers.

    Ray 2.60 listens at every address of the host unless its node has the address 127.0.0.1. A request for that address
    is ignored unless clusters are turned off, as they are on macOS and Windows. The variable turns them off for the
    started processes, the constant for this process.
    """
    name, constants = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants
    variable, constant = os.environ.get(name), constants.ENABLE_RAY_CLUSTER
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = constant
        os.environ.pop(name)
        if variable is not None:
            os.environ[name] = variable
