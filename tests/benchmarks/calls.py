"""What each call costs the coordinator's process, by its own objects: the `planning.scale.Costs` of this machine.

All are seconds of CPU time of that one process, so that other work on the machine counts little; medians of rounds.
Engines, relays and the trainer cost nothing: they are doubles, here or, for what Ray adds, in a process of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import pickle
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.cluster import create as cluster_create
from libra_jax.planning import calibration, scale
from libra_jax.scheduling import registry
from libra_jax.telemetry import files, status
from tests.benchmarks import coordinator, handover, loop_workers, planner, publishing, scheduler

SHAPES = (
    coordinator.Shape(1, 1, 16),
    coordinator.Shape(1, 16, 16),
    coordinator.Shape(1, 1, 2_048),
    coordinator.Shape(8, 1, 16),
    coordinator.Shape(2, 1, 16, 4_000),
    coordinator.Shape(8, 1, 16, 500),
)
"""Of which each asks for much of another thing."""

HELD_OUT = coordinator.Shape(12, 4, 256, 300)
"""Predicted from the others, and measured."""

REQUESTS = 100
ATTEMPT_COSTS = ("request", "turn", "delta", "generated_token", "payload_token", "context_token")

CALLS, ACTORS = 2_000, 4
LIVE = (1_024, 21_845, 218_453)
"""Live requests: two batches of 512 for each 48 accelerators, at 48, 1,024 and 10,240."""

AWAY, DECISIONS = 0.6, 20_000
WORKERS = 2_048
TOKENS = 8_192
PROCESSES = 4
"""Processes of the trainer to which a batch is handed."""

LOOPS, LOOP_SECONDS = 256, 10.0
"""Rollouts under way on loop workers, and seconds of a measurement."""


@dataclasses.dataclass(frozen=True)
class Check:
    """CPU seconds of something that the costs were not fitted to."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative, above 0 where too much was predicted."""
        return self.predicted / self.measured - 1.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """All of it.

    Attributes:
      costs: with every actor in a process of its own, placed by Ray.
      embedded: an attempt's, with engines in the coordinator's own process; as far as they differ.
      checks: of both, and of a publication.
    """

    costs: scale.Costs
    embedded: dict[str, float]
    checks: tuple[Check, ...]


def measure(rounds: int, progress: Callable[[str], None]) -> Measured:
    """Measures them one after the other; about five minutes on two idle cores.

    Args:
      rounds: of each, of which the median counts.
      progress: told what is measured next.
    """
    progress("an attempt, with its engine in this process")
    embedded, in_process = attempts("inprocess", rounds)
    progress("an attempt, with its engine in a process of its own")
    remote, by_ray = attempts("ray", rounds)
    progress("actors and calls")
    actor, call = asyncio.run(_ray(rounds))
    progress("agent loops on loop workers")
    beside = _loops(rounds)
    progress("publications, status, batches")
    published = publishing.costs(rounds)
    publication = Check(*publishing.held_out(published, rounds))
    status_seconds, token_bytes = _status(rounds), _token_bytes()
    handed = handover.costs(PROCESSES)
    progress("decisions")
    decisions = {live: decision(live) for live in LIVE}
    progress("searches for a plan")
    searches = {devices: planner.cpu_seconds(devices) for devices in planner.ACCELERATORS}
    costs = scale.Costs(
        **remote,
        **published,
        **beside,
        actor=actor,
        call=call,
        status=status_seconds,
        **handed,
        token_bytes=token_bytes,
        decisions=decisions,
        planner=searches,
    )
    return Measured(costs, embedded, (in_process, by_ray, publication))


def attempts(backend: str, rounds: int) -> tuple[dict[str, float], Check]:
    """`ATTEMPT_COSTS` as measured under a backend; and how far `HELD_OUT` is off."""

    def seconds(shape: coordinator.Shape) -> float:
        taken = coordinator.cpu_seconds(shape, REQUESTS, backend=backend, rounds=max(2, rounds))
        return statistics.median(asyncio.run(taken))

    values, predicted = fit(seconds)
    return values, Check(f"an attempt of {HELD_OUT.turns} turns, {backend}", predicted, seconds(HELD_OUT))


def fit(seconds: Callable[[coordinator.Shape], float]) -> tuple[dict[str, float], float]:
    """`ATTEMPT_COSTS` from CPU seconds of each of `SHAPES`; and those of `HELD_OUT` that they foretell.

    Non-negative least squares of relative errors: a cost that the noise hides is 0.
    """
    taken = np.array([seconds(shape) for shape in SHAPES])
    rows = np.array([counts(shape) for shape in SHAPES]) / taken[:, None]
    values = dict(zip(ATTEMPT_COSTS, map(float, calibration.non_negative_fit(rows, np.ones(len(SHAPES)))), strict=True))
    return values, float(np.dot(counts(HELD_OUT), list(values.values())))


def counts(shape: coordinator.Shape) -> list[float]:
    """How often each of `ATTEMPT_COSTS` comes in an attempt."""
    payload = shape.payload * (shape.turns - 1)
    return [1.0, shape.turns, shape.turns * shape.deltas, shape.turns * shape.tokens, payload, shape.sent]


def _loops(rounds: int) -> dict[str, float]:
    """Of rollouts on loop workers: one, a turn of it, and a token, by the differences of three shapes."""

    def rollout(turns: int, tokens: int) -> float:
        shape = loop_workers.Shape(turns, tokens, max(1, tokens // 128), 1.0)
        found = loop_workers.measure(shape, workers=4, live=LOOPS, seconds=LOOP_SECONDS)
        return turns * found.turn_seconds

    # By turns, because a machine is slower at times.
    taken = np.array([[rollout(1, 16), rollout(8, 16), rollout(8, 2_048)] for _ in range(rounds)])
    few, many, long = map(float, np.median(taken, axis=0))
    turn = max(0.0, (many - few) / 7)
    token = max(0.0, (long - many) / (8 * (2_048 - 16)))
    return {"loop_request": max(0.0, few - turn), "loop_turn": turn, "loop_token": token}


async def _ray(rounds: int) -> tuple[float, float]:
    """Of an actor that is made, and of a call among many."""
    cluster = cluster_create.create(configuration.ClusterConfig(backend="ray"))
    try:
        await cluster.spawn(_spec("first"))  # starts Ray
        begin = time.process_time()
        proxies = [await cluster.spawn(_spec(f"actor-{number}")) for number in range(ACTORS)]
        made = (time.process_time() - begin) / ACTORS
        spent = []
        for _ in range(rounds + 1):
            begin = time.process_time()
            asked = [proxies[number % ACTORS] for number in range(CALLS)]
            await asyncio.gather(*(actor.call(protocols.RolloutEngine.health) for actor in asked))
            spent.append((time.process_time() - begin) / CALLS)
    finally:
        await cluster.shutdown()
    return made, statistics.median(spent[1:])


def _spec(name: str) -> protocols.ActorSpec:
    return protocols.ActorSpec(name, f"{coordinator.__name__}:instant", {"deltas": 1, "pause": 0.0})


def decision(live: int) -> float:
    """Mean of C-MLFQ's decisions with so many live requests, on as many instances as these have."""
    config = configuration.SchedulerConfig(policy="cmlfq", max_remaining_tokens=scheduler.BOUNDS, ageing_seconds=1e9)
    times = max(1, round(live / LIVE[0]))
    layout = {degree: times * count for degree, count in {1: 6, 2: 3, 4: 2, 8: 1}.items()}
    load = scheduler.Load(registry.create(config), live=live, away=int(AWAY * live), layout=layout)
    load.nanoseconds.clear()
    load.returns(DECISIONS)
    spent = [nanoseconds for event in load.nanoseconds.values() for nanoseconds in event]
    return 1e-9 * statistics.fmean(spent)


def _status(rounds: int) -> float:
    """Of a worker in `status.json`, written as the heartbeat writes it."""
    run = status.RunStatus("scale", 100, 1, time.monotonic)
    for number in range(WORKERS):
        run.status(f"rollout-{number}", f"serving version 12, {number % 32} requests running")
    with tempfile.TemporaryDirectory(prefix="libra-jax-scale-") as folder:
        file = pathlib.Path(folder) / status.STATUS_FILE
        return _median(lambda: file.write_bytes(files.json_line(run.view())), rounds) / WORKERS


def _token_bytes() -> float:
    """Of memory that a sampled token takes in a trajectory, as it comes from another process."""
    tracemalloc.start()
    try:
        for seed in (1, 2, 3):
            _trajectory(seed)  # the interpreter's free lists of tuples fill up, and belong to no token
        before, _ = tracemalloc.get_traced_memory()
        kept = _trajectory(0)
        size, _ = tracemalloc.get_traced_memory()
        return (size - before) / len(kept.token_ids)
    finally:
        tracemalloc.stop()


def _trajectory(seed: int, interval: int = 16) -> protocols.Trajectory:
    drawn, made = random.Random(seed), protocols.Trajectory(f"{seed}/0", str(seed))
    for _ in range(TOKENS // interval):
        ids = tuple(drawn.randrange(150_000) for _ in range(interval))
        probs = tuple(-drawn.random() for _ in range(interval))
        delta = protocols.TokenDelta(ids, probs, (12,) * interval, None)
        made.append_sampled(pickle.loads(pickle.dumps(delta, protocol=5)))
    return made


def _median(work: Callable[[], object], rounds: int) -> float:
    """CPU seconds of it; one goes before and is not counted."""
    spent: list[float] = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return statistics.median(spent[1:])


def as_values(measured: Measured) -> dict[str, Any]:
    """What launch/scale.py --costs reads."""
    return {
        "costs": dataclasses.asdict(measured.costs),
        "embedded": measured.embedded,
        "checks": [{**dataclasses.asdict(check), "error": check.error} for check in measured.checks],
    }
