"""What is left when actors, or the process that made them, end or are killed: nothing."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import time

import psutil
import pytest
from cluster_actors import Counter, Streamer

from libra_jax.cluster import guard, ray_cluster, ray_runtime
from libra_jax.protocols import ActorSpec, ConfigError, DeadlineMissed, WorkerLost

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess]

SHARED_MEMORY = pathlib.Path("/dev/shm")

DRIVER = """
import asyncio, os, sys
sys.path.append(sys.argv[1])
from cluster_actors import Counter, Streamer
from libra_jax.cluster import ray_cluster
from libra_jax.protocols import ActorSpec

async def main():
    cluster = ray_cluster.RayCluster(start_seconds=120, shutdown_seconds=20, object_store_mib=100)
    counter = await cluster.spawn(ActorSpec("counter", "cluster_actors:Counter", {}))
    streamer = await cluster.spawn(ActorSpec("streamer", "cluster_actors:Streamer", {}, environment={"LIBRA": "1"}))
    sleeping = asyncio.ensure_future(counter.call(Counter.sleep, 600))
    print(*await streamer.call(Streamer.child), flush=True)
    await sleeping

asyncio.run(main())
"""


def left(pids: set[int], seconds: float = 30.0) -> set[int]:
    """Those of the processes that still run after at most `seconds`; zombies have ended."""
    deadline = time.monotonic() + seconds
    while (pids := {pid for pid in pids if runs(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def threads(pid: int) -> set[str]:
    """Names of the threads of a process."""
    return {file.read_text().strip() for file in pathlib.Path(f"/proc/{pid}/task").glob("*/comm")}


def gone(path: pathlib.Path, seconds: float = 30.0) -> None:
    """Asserts that the path goes within so many seconds."""
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not path.exists()


def ray_directories() -> set[pathlib.Path]:
    return set(pathlib.Path("/tmp").glob("libra-ray-*"))


def test_no_other_user_reaches_the_folder_of_an_embedded_ray(ray_session):
    import ray

    session = pathlib.Path(ray._private.worker._global_node.get_session_dir_path())
    above = [folder for folder in session.parents if folder.name.startswith("libra-ray-")]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in above] == [0o700]


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_process_file_or_shared_memory():
    directories = ray_directories()
    command = [sys.executable, "-c", DRIVER, str(pathlib.Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        child, memory = driver.stdout.readline().split()
        assert (SHARED_MEMORY / memory).exists()
        started = {process.pid for process in psutil.Process(driver.pid).children(recursive=True)}
        assert int(child) in started
        assert len(started) >= 5
        assert len(ray_directories() - directories) == 1
        driver.kill()
    remaining = left(started)
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)
    assert remaining == set()
    gone(SHARED_MEMORY / memory)
    for directory in ray_directories() - directories:
        gone(directory)
    assert not set(SHARED_MEMORY.glob("plasma*"))


def test_all_of_an_actors_process_and_what_it_starts_keeps_to_its_cores(ray_session):
    core = max(os.sched_getaffinity(0))

    async def body():
        cluster = ray_cluster.RayCluster(start_seconds=120)
        pinned = ActorSpec("pinned", "cluster_actors:Streamer", {}, cores=(core,))
        nowhere = ActorSpec("nowhere", "cluster_actors:Streamer", {}, cores=(4095,))
        for spec, expected in ((pinned, {core}), (nowhere, os.sched_getaffinity(0))):
            streamer = await cluster.spawn(spec)
            child, _ = await streamer.call(Streamer.child)
            threads = [*map(int, os.listdir(f"/proc/{await streamer.call(Streamer.pid)}/task")), child]
            assert len(threads) > 2
            assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset(expected)}
            await cluster.stop(spec.name)

    asyncio.run(body())


def test_gpus_that_this_machine_lacks_are_refused_without_a_wait(ray_session):
    async def body():
        cluster = ray_cluster.RayCluster(start_seconds=600)
        async with asyncio.timeout(60):
            with pytest.raises(ConfigError, match="'trainer' asks for 3 GPUs, and this machine has 0"):
                await cluster.spawn(ActorSpec("trainer", "cluster_actors:Counter", {}, gpus=3))

    asyncio.run(body())


def test_an_actor_is_killed_without_being_asked_and_its_name_is_free(ray_session):
    async def body():
        cluster = ray_cluster.RayCluster(start_seconds=120, shutdown_seconds=60)
        spec = ActorSpec("sleeper", "cluster_actors:Counter", {})
        sleeper = await cluster.spawn(spec)
        pid = await sleeper.call(Counter.pid)
        sleeping = asyncio.ensure_future(sleeper.call(Counter.sleep, 600))  # its thread hears of nothing
        await asyncio.sleep(0.5)
        async with asyncio.timeout(30):
            await cluster.kill("sleeper")
            await cluster.kill("sleeper")
        assert left({pid}, 1.0) == set()
        with pytest.raises(WorkerLost):
            await sleeping
        assert await (await cluster.spawn(spec)).call(Counter.pid) != pid
        await cluster.stop("sleeper")

    asyncio.run(body())


def test_an_actor_that_is_killed_is_lost_to_every_call_and_takes_its_children_along(ray_session, caplog):
    async def body():
        cluster = ray_cluster.RayCluster(start_seconds=120)
        streamer = await cluster.spawn(ActorSpec("engine", "cluster_actors:Streamer", {}))
        pid, (child, memory) = await streamer.call(Streamer.pid), await streamer.call(Streamer.child)
        waiting = asyncio.ensure_future(streamer.call(Streamer.wait))
        stream = streamer.stream(Streamer.forever)
        assert await anext(stream) == 1
        reading = asyncio.ensure_future(anext(stream))
        await streamer.call(Streamer.count_closed)
        assert "engine" in threads(pid), "whoever looks for an actor from outside finds it by a thread's name"
        os.kill(pid, signal.SIGKILL)
        for call in (waiting, reading, streamer.call(Streamer.pid), anext(streamer.stream(Streamer.forever))):
            with pytest.raises(WorkerLost, match=rf"^actor 'engine' is lost: its process {pid} died;"):
                await asyncio.wait_for(call, 20)
        assert left({pid, child}) == set()
        gone(SHARED_MEMORY / memory)

        again = await cluster.spawn(ActorSpec("engine", "cluster_actors:Streamer", {}))  # without a stop in between
        replacement = await again.call(Streamer.pid)
        assert replacement != pid
        child, memory = await again.call(Streamer.child)
        await cluster.stop("engine")
        assert not runs(replacement)
        told = [record.getMessage() for record in caplog.records if "unasked" in record.getMessage()]
        assert told == [f"Actor engine has ended unasked (process {pid})."], "and not of the one that was stopped"
        assert left({child}) == set()
        gone(SHARED_MEMORY / memory)
        await cluster.shutdown()

    asyncio.run(body())


def test_an_actor_that_cannot_be_placed_is_named_with_what_it_asks_for(ray_session):
    async def body():
        cluster = ray_cluster.RayCluster(start_seconds=1.0)
        with pytest.raises(DeadlineMissed, match=r"actor 'greedy' was not placed within 1 s: it asks for 1e\+06 CPUs"):
            await cluster.spawn(ActorSpec("greedy", "cluster_actors:Counter", {}, cpus=1e6))
        await cluster.shutdown()

    asyncio.run(body())


def test_a_guard_ends_a_process_group_that_ignores_signals_and_removes_a_directory(tmp_path):
    directory = tmp_path / "directory"
    directory.mkdir()
    command = ["/bin/sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as shell:
        child = int(shell.stdout.readline())
        watching = guard.Guard([2**22 + 1, -shell.pid], str(directory))  # the first does not exist
        assert runs(child)
        assert watching.fire(10)
        assert shell.wait(10) == -signal.SIGKILL
    assert left({child}) == set()
    assert not directory.exists()


STUBBORN = """
import signal, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""


def test_a_guard_spares_the_tracker_that_removes_the_shared_memory_of_a_process_that_ignores_signals():
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as stubborn:
        memory = SHARED_MEMORY / stubborn.stdout.readline().strip()
        assert memory.exists()
        assert guard.Guard([-stubborn.pid]).fire(20)
        assert stubborn.wait(10) == -signal.SIGKILL
    gone(memory)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("nowhere", "no Ray cluster answers at 'nowhere'"),
        ("ray://127.0.0.1:10001", 'give the head as "host:port"'),
        ("", "something else listens there"),
    ],
)
def test_an_address_without_a_cluster_is_refused_in_a_sentence_within_30_seconds(address, sentence):
    script = """
import asyncio, sys
from libra_jax.cluster import ray_cluster
from libra_jax.protocols import ActorSpec, ConfigError
cluster = ray_cluster.RayCluster(sys.argv[1], start_seconds=60)
async def main():
    try:
        await cluster.spawn(ActorSpec("x", "a:b", {}))
    except ConfigError as error:
        print(error)
    await cluster.shutdown()
asyncio.run(main())
"""
    with socket.create_server(("127.0.0.1", 0)) as other:  # that speaks nothing
        address = address or f"127.0.0.1:{other.getsockname()[1]}"
        command = [sys.executable, "-c", script, address]
        begun = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sentence in done.stdout
    assert time.monotonic() - begun < 30


def test_a_machine_that_is_no_node_of_a_cluster_is_told_how_to_become_one(monkeypatch):
    monkeypatch.setattr(ray_runtime.psutil, "process_iter", lambda _: [])
    with pytest.raises(ConfigError, match=r"no node of the cluster at 'head:1'.*`ray start --address=head:1`"):
        ray_runtime._wait_for_node("head:1", 0.1)
