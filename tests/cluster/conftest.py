"""The two backends, and one Ray for all the tests that need it."""

from __future__ import annotations

import asyncio
import pathlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest

from libra_jax.cluster import create
from libra_jax.config import ClusterConfig
from libra_jax.protocols import ActorSpec

sys.path.append(str(pathlib.Path(__file__).parent))  # cluster_actors, which factories name


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Starts Ray as a run would; at its end sees to it that no process, file or shared memory is left."""
    import ray

    from libra_jax.cluster import ray_runtime

    children = {child.pid for child in psutil.Process().children()}
    runtime = ray_runtime.RayRuntime("", object_store_mib=100, start_seconds=120)
    asyncio.run(runtime.ensure())
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in children]
    directory = pathlib.Path(ray._private.worker._global_node.get_session_dir_path()).parent
    assert len(started) >= 5
    assert directory.exists()
    yield
    asyncio.run(runtime.end(60))
    _, alive = psutil.wait_procs(started, timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not directory.exists()
    assert not set(pathlib.Path("/dev/shm").glob("plasma*"))


@pytest.fixture(params=["inprocess", pytest.param("ray", marks=pytest.mark.ray)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return request.param


Body = Callable[..., Awaitable[Any]]


def make_cluster(backend: str, shutdown_seconds: float) -> Any:
    return create.create(ClusterConfig(backend=backend), shutdown_seconds=shutdown_seconds, start_seconds=120)


@pytest.fixture
def in_cluster(backend: str) -> Callable[..., Any]:
    """Runs an async function of a new cluster, which is shut down afterwards."""

    def run(body: Body, shutdown_seconds: float = 30.0) -> Any:
        async def main() -> Any:
            cluster = make_cluster(backend, shutdown_seconds)
            try:
                return await body(cluster)
            finally:
                await cluster.shutdown()

        return asyncio.run(main())

    return run


Shared = tuple[asyncio.Runner, Any, Any, Any]


def share(backend: str) -> Iterator[Shared]:
    """An event loop, a cluster on it and two actors; a process for each test would be most of the tests' time."""

    async def make() -> tuple[Any, Any, Any]:
        cluster = make_cluster(backend, 30.0)
        counter = cluster.spawn(ActorSpec("counter", "cluster_actors:Counter", {}))
        streamer = cluster.spawn(ActorSpec("streamer", "cluster_actors:Streamer", {}))
        return cluster, *await asyncio.gather(counter, streamer)

    with asyncio.Runner() as runner:
        cluster, counter, streamer = runner.run(make())
        yield runner, cluster, counter, streamer
        runner.run(cluster.shutdown())


@pytest.fixture(scope="session")
def shared_inprocess() -> Iterator[Shared]:
    yield from share("inprocess")


@pytest.fixture(scope="session")
def shared_ray(ray_session: None) -> Iterator[Shared]:
    yield from share("ray")


@pytest.fixture
def with_actors(backend: str, request: pytest.FixtureRequest) -> Callable[[Body], Any]:
    """Runs an async function of a cluster, its Counter and its Streamer, which outlive the test."""
    runner, *cluster_and_actors = request.getfixturevalue(f"shared_{backend}")
    return lambda body: runner.run(body(*cluster_and_actors))
