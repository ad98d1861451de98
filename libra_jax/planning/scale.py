"""What grows with a cluster besides its work: start-up, publication, and what the one coordinator has to do.

The coordinator is one process with one event loop, so what it spends on every request, turn, delta, engine and weight
bucket adds up in one core. `Costs` has what each was measured to take, `Work` what a training step consists of, and
`Settings` how a run is configured; `loads` says what comes of these on so many accelerators. The batch grows with the
cluster (as many trajectories for each accelerator), so that a step takes as long on any.

Each load has a limit; the one that reaches its limit with the fewest accelerators is the first bottleneck. Links and
starts of engines are not measured but given, and nothing here knows of failures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from libra_jax import protocols

FAN_OUT = 2
"""Relays to which one passes a bucket on (`weights.relay_tree`)."""

PUBLICATION_CALLS = 4
"""Of an engine, besides one for each bucket: pause, prepare, finish, resume."""

RELAY_CALLS = 2
"""Of a bucket on its way to a host: send and receive."""

START_CALLS = 3
"""Of an engine that starts, once its process is there: start, its transport, its health."""

MOST = 2**24
"""Accelerators up to which a limit is looked for."""

MIB = 2**20


@dataclass(frozen=True)
class Costs:
    """CPU seconds of the coordinator's process, each time; zero where it is not known.

    Attributes:
      request: an attempt, from its begin to its end, apart from what follows.
      turn: a model output: its call, decisions and stream, and the tool's return.
      delta: a part in which its tokens come.
      generated_token: kept with its log-probability and version.
      payload_token: of a tool's return: rendered, tokenised and kept.
      context_token: sent to the engine with a turn.
      actor: made by the cluster.
      call: of a method of an actor; also an answer of an engine's process with all that has come in on its streams.
      engine_update: an engine's part in a publication apart from its calls.
      engine_bucket: of a bucket that an engine loads, likewise.
      host_bucket: of a bucket that comes to a host, likewise.
      health: of looking after an engine, its call apart.
      serving: of taking an engine up among those that serve.
      status: of a worker, each time the status is written.
      batch_token: of a trained token that is handed to the trainer.
      token_bytes: of memory that a trajectory's token takes, no seconds.
      decisions: number of live requests to seconds of a decision, of which a turn takes two; `turn` has those of few.
      planner: number of accelerators to seconds of a search for a plan.
    """

    request: float
    turn: float
    delta: float
    generated_token: float
    payload_token: float
    context_token: float
    actor: float
    call: float
    engine_update: float
    engine_bucket: float
    host_bucket: float
    health: float
    serving: float
    status: float
    batch_token: float
    token_bytes: float
    decisions: Mapping[int, float]
    planner: Mapping[int, float]

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            values = value.values() if isinstance(value, Mapping) else (value,)
            if not all(isinstance(one, int | float) and 0.0 <= one < math.inf for one in values):
                raise protocols.ConfigError(
                    f"costs.{item.name}: {value} is no cost; give seconds (token_bytes: bytes) of 0 or more"
                )
            if isinstance(value, Mapping) and (not value or min(value) < 1 or min(value.values()) <= 0.0):
                raise protocols.ConfigError(
                    f"costs.{item.name}: {dict(value)} needs one size at least, each from 1 on and with seconds above 0"
                )


@dataclass(frozen=True)
class Work:
    """A training step's work on `accelerators`, and the layout there; means are of its trajectories.

    Attributes:
      accelerators: that train and roll out.
      engines: rollout instances.
      rollout_accelerators: those of the instances.
      trajectories: of a step.
      turns: model outputs of one.
      generated_tokens: of one.
      payload_tokens: of one, from tools.
      sent_tokens: of one: its context, summed over its turns.
      trained_tokens: of one: its whole context at the end.
      step_seconds: that the step takes.
      weight_bytes: that a publication moves.
    """

    accelerators: int
    engines: int
    rollout_accelerators: int
    trajectories: int
    turns: float
    generated_tokens: float
    payload_tokens: float
    sent_tokens: float
    trained_tokens: float
    step_seconds: float
    weight_bytes: float

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, least = getattr(self, item.name), 0.0 if item.name == "payload_tokens" else 1e-9
            if not least <= value < math.inf:
                raise protocols.ConfigError(f"work.{item.name}: {value} is not possible; give a number above 0")


@dataclass(frozen=True)
class Settings:
    """How the run is configured, and what stands around it.

    Attributes:
      stream_interval: tokens between two deltas (`rollout.stream_interval`).
      bucket_mib: MiB of a weight bucket (`rollout.bucket_mib`).
      health_seconds: between two looks at an engine (`rollout.health_seconds`).
      staleness: eta; batches of eta + 1 steps are live.
      accelerators_per_host: that share a relay.
      link_bytes_per_second: from one host to another, one direction.
      load_seconds: that an engine takes to put new weights in place, besides receiving them.
      engine_start_seconds: that an engine takes to start once its process is there; all start at once.
      gather_seconds: for which news of an engine's process wait for others (`cluster.ray_streams`).
      status_seconds: between two writes of the status.
      start_limit: seconds that a start may take (`deadlines.engine_start`).
      silent_limit: seconds for which the event loop may be silent (`telemetry.status`).
      publication_share: of a step, that a publication may take.
      memory_bytes: of the coordinator's host.
    """

    stream_interval: int = 16
    bucket_mib: int = 256
    health_seconds: float = 10.0
    staleness: int = 1
    accelerators_per_host: int = 8
    link_bytes_per_second: float = 20e9
    load_seconds: float = 0.5
    engine_start_seconds: float = 60.0
    gather_seconds: float = 1e-3
    status_seconds: float = 1.0
    start_limit: float = 300.0
    silent_limit: float = 10.0
    publication_share: float = 0.1
    memory_bytes: float = 1e12

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            possible = 0 <= value < math.inf
            if not possible or (value == 0 and item.name not in ("staleness", "load_seconds", "engine_start_seconds")):
                raise protocols.ConfigError(f"settings.{item.name}: {value} is not possible; give a number above 0")


@dataclass(frozen=True)
class Part:
    """One thing that grows.

    Attributes:
      value: how much of it there is, in the unit of the limit.
      limit: from which on it holds the run up.
      unit: of both.
    """

    value: float
    limit: float
    unit: str

    @property
    def ratio(self) -> float:
        """1 at the limit."""
        return self.value / self.limit


@dataclass(frozen=True)
class Loads:
    """What comes of so many accelerators.

    Attributes:
      accelerators: as asked.
      engines: rollout instances.
      rates: of requests, turns, deltas and generated tokens, each a second.
      coordinator: shares of a core, by what they are spent on.
      publication: seconds, by what they are spent on; bytes and calls overlap, loading follows.
      start: seconds, likewise; engines start while others are made.
      parts: what has a limit, by name.
    """

    accelerators: int
    engines: float
    rates: Mapping[str, float]
    coordinator: Mapping[str, float]
    publication: Mapping[str, float]
    start: Mapping[str, float]
    parts: Mapping[str, Part]

    @property
    def bottleneck(self) -> str:
        """The part that is nearest to its limit, or farthest beyond."""
        return max(self.parts, key=lambda name: self.parts[name].ratio)


def grown(known: Mapping[int, float], size: float) -> float:
    """Seconds at a size: between measured ones along a power law, beyond them by that of the nearest two.

    What shrank from one size to the next, by noise, counts as constant; so does a single size.
    """
    sizes = sorted(known)
    if size <= sizes[0] or len(sizes) == 1:
        return known[sizes[0]]
    upper = next((place for place, one in enumerate(sizes) if one >= size), len(sizes) - 1)
    levels = [known[sizes[0]]]
    for one in sizes[1:]:
        levels.append(max(levels[-1], known[one]))
    low, high = sizes[upper - 1], sizes[upper]
    power = math.log(levels[upper] / levels[upper - 1]) / math.log(high / low)
    return float(levels[upper - 1] * (size / low) ** power)


def loads(costs: Costs, work: Work, settings: Settings, accelerators: int) -> Loads:
    """What comes of so many accelerators.

    Raises:
      ConfigError: they are fewer than 1.
    """
    if accelerators < 1:
        raise protocols.ConfigError(f"accelerators: {accelerators} is no size of a cluster; give 1 or more")
    times = accelerators / work.accelerators
    engines, trajectories = times * work.engines, times * work.trajectories
    live = (settings.staleness + 1) * trajectories
    each = trajectories / work.step_seconds
    rates = {
        "requests": each,
        "turns": each * work.turns,
        "deltas": each * _deltas(work, settings),
        "tokens": each * work.generated_tokens,
    }
    coordinator = _coordinator(costs, work, settings, rates, engines, live)
    publication = _publication(costs, work, settings, times)
    start = _start(costs, work, settings, times)
    tokens = trajectories * work.trained_tokens
    silent, planned = settings.silent_limit, grown(costs.planner, accelerators)
    parts = {
        "coordinator": Part(sum(coordinator.values()), 1.0, "cores"),
        "publication": Part(
            max(publication["bytes"], publication["calls"]) + publication["load"],
            settings.publication_share * work.step_seconds,
            "s",
        ),
        "start-up": Part(sum(start.values()), settings.start_limit, "s"),
        "batch": Part(costs.batch_token * tokens, silent, "s"),
        "planner": Part(planned, silent, "s"),
        "memory": Part((settings.staleness + 1) * costs.token_bytes * tokens / 1e9, settings.memory_bytes / 1e9, "GB"),
    }
    return Loads(accelerators, engines, rates, coordinator, publication, start, parts)


def _coordinator(
    costs: Costs, work: Work, settings: Settings, rates: Mapping[str, float], engines: float, live: float
) -> dict[str, float]:
    turns, requests = rates["turns"], rates["requests"]
    alone = rates["deltas"] / engines
    news = rates["deltas"] / (1.0 + settings.gather_seconds * alone)  # what comes within it travels together
    waiting = max(0.0, grown(costs.decisions, live) - grown(costs.decisions, 1))
    workers = engines + hosts(work, settings, engines / work.engines)
    return {
        "requests": requests * costs.request,
        "turns": turns * costs.turn,
        "scheduler's growth": 2.0 * turns * waiting,
        "deltas": rates["deltas"] * costs.delta + news * costs.call,
        "tokens": rates["tokens"] * costs.generated_token
        + requests * (work.payload_tokens * costs.payload_token + work.sent_tokens * costs.context_token),
        "health": engines * (costs.health + costs.call) / settings.health_seconds,
        "status": workers * costs.status / settings.status_seconds,
    }


def _deltas(work: Work, settings: Settings) -> float:
    """Of an attempt: a turn's last one has half an interval's tokens on average."""
    return max(work.turns, work.generated_tokens / settings.stream_interval + work.turns / 2)


def _publication(costs: Costs, work: Work, settings: Settings, times: float) -> dict[str, float]:
    targets, engines = hosts(work, settings, times), times * work.engines
    count = buckets(work, settings)
    depth = math.ceil(math.log(targets + 1.0, FAN_OUT))
    copies = min(FAN_OUT, targets)  # that the trainer's host sends
    calls = engines * (costs.engine_update + PUBLICATION_CALLS * costs.call)
    calls += engines * count * (costs.engine_bucket + costs.call)
    calls += targets * count * (costs.host_bucket + RELAY_CALLS * costs.call)
    return {
        "bytes": copies * work.weight_bytes / settings.link_bytes_per_second * (1.0 + depth / count),
        "calls": calls,
        "load": settings.load_seconds,
    }


def _start(costs: Costs, work: Work, settings: Settings, times: float) -> dict[str, float]:
    engines = times * work.engines
    workers = engines + hosts(work, settings, times)
    return {
        "actors": workers * costs.actor,
        "calls": engines * START_CALLS * costs.call,
        "serving": engines * costs.serving,
        "engines": settings.engine_start_seconds,
    }


def hosts(work: Work, settings: Settings, times: float) -> float:
    """Of rollout, on so many times the accelerators of the work."""
    return max(1.0, times * work.rollout_accelerators / settings.accelerators_per_host)


def buckets(work: Work, settings: Settings) -> int:
    """Of a publication."""
    return max(1, math.ceil(work.weight_bytes / (settings.bucket_mib * MIB)))


def reached(costs: Costs, work: Work, settings: Settings, part: str) -> int | None:
    """The fewest accelerators with which a part is at its limit or beyond; None up to `MOST`."""

    def beyond(accelerators: int) -> bool:
        return loads(costs, work, settings, accelerators).parts[part].ratio >= 1.0

    if not beyond(MOST):
        return None
    low, high = 0, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return high


def first(costs: Costs, work: Work, settings: Settings) -> tuple[str, int] | None:
    """The part that reaches its limit first as the cluster grows, and with how many accelerators."""
    names = loads(costs, work, settings, work.accelerators).parts
    at = {name: found for name in names if (found := reached(costs, work, settings, name)) is not None}
    return min(at.items(), key=lambda item: item[1]) if at else None
