"""Predicts the overhead that grows with a cluster: start-up, weight sync, and the load of the one coordinator.

The coordinator is one process with one event loop. So its work on every request, turn, delta, engine and chunk of
weights adds up in one core. `Costs` has the measured cost of each, `Work` the content of a training step, and
`Settings` the configuration of the run. `loads` computes the result for a number of accelerators. The batch grows with
the cluster (the same number of trajectories for each accelerator), so that a step takes equally long at any size.

Each load has a limit. The load that reaches its limit with the fewest accelerators is the first bottleneck. Link
rates and engine start times are given, not measured, and failures are not modelled.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from libra_jax import protocols

FAN_OUT = 2
"""Weight relays to which one relay passes a chunk on (`weights.relay_tree`)."""

SYNC_CALLS = 4
"""Calls of an engine in a weight sync, besides one for each chunk: pause, prepare, finish, resume."""

RELAY_CALLS = 2
"""Calls of a chunk on its way to a host: send and receive."""

START_CALLS = 3
"""Calls of a starting engine once its process exists: start, its transport, its health."""

MOST = 2**24
"""Most accelerators up to which a limit is searched for."""

BUSY = 0.7
"""Share of a core that the coordinator may use after a remedy: an event loop that is never idle answers late."""

MIB = 2**20


@dataclass(frozen=True)
class Costs:
    """CPU seconds of the coordinator's process for each event; zero if a cost is not known.

    Attributes:
      request: seconds of a rollout, from its begin to its end, without the parts below.
      turn: seconds of a model output: its call, decisions and stream, and the tool's return.
      delta: seconds of one delta of tokens.
      generated_token: seconds of keeping a token with its log-probability and version.
      payload_token: seconds of a tool return's token: rendered, tokenised and kept.
      context_token: seconds of a token sent to the engine with a turn.
      actor: seconds of making an actor.
      call: seconds of a call to an actor; also of an answer of an engine's process with all news on its streams.
      engine_update: seconds of an engine's part in a weight sync, without its calls.
      engine_chunk: seconds of a chunk that an engine loads, without its calls.
      host_chunk: seconds of a chunk that comes to a host, without its calls.
      health: seconds of a health check of an engine, without its call.
      serving: seconds of adding an engine to those that serve.
      status: seconds of a worker's entry, each time the status is written.
      loop_request: `request` of a rollout whose agent loop is on a loop worker.
      loop_turn: `turn` of such a rollout, its share of messages included.
      loop_token: seconds of keeping a token of such a rollout, generated or from a tool.
      batch_token: seconds of putting a trained token into the object store.
      batch_rollout: seconds of finding the rows of a rollout of a batch, and putting its outline there.
      fetch_token: seconds in which a trainer process reads and makes arrays of a token that it trains.
      fetch_rollout: seconds in which a trainer process finds the place of a rollout from its outline. The coordinator's
        process does not spend these two.
      token_bytes: bytes of memory that a trajectory's token takes, not seconds.
      decisions: number of live requests to seconds of a decision; a turn takes two. `turn` includes those of few
        requests.
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
    engine_chunk: float
    host_chunk: float
    health: float
    serving: float
    status: float
    loop_request: float
    loop_turn: float
    loop_token: float
    batch_token: float
    batch_rollout: float
    fetch_token: float
    fetch_rollout: float
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
    """A training step's work on `accelerators`, and the layout there; means are over its trajectories.

    Attributes:
      accelerators: accelerators that train and roll out.
      engines: rollout instances.
      rollout_accelerators: accelerators of the instances.
      trajectories: trajectories of a step.
      turns: mean model outputs of a trajectory.
      generated_tokens: mean generated tokens of a trajectory.
      payload_tokens: mean tokens from tools of a trajectory.
      sent_tokens: mean context of a trajectory, summed over its turns.
      trained_tokens: mean whole context of a trajectory at its end.
      step_seconds: seconds of the step.
      weight_bytes: bytes that a weight sync moves.
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
    """Configuration of the run, and properties of its surroundings.

    Attributes:
      stream_interval: tokens between two deltas (`rollout.stream_interval`).
      loop_workers: agent loops run beside the engines (`rollout.loop_workers` above 0), not in the coordinator.
      chunk_mib: MiB of a chunk of weights (`rollout.chunk_mib`).
      health_seconds: seconds between two looks at an engine (`rollout.health_seconds`).
      staleness: max staleness; batches of staleness + 1 steps are live.
      accelerators_per_host: accelerators that share a weight relay.
      link_bytes_per_second: rate from one host to another, in one direction.
      load_seconds: seconds in which an engine puts new weights in place, besides receiving them.
      engine_start_seconds: seconds of an engine's start once its process exists; all engines start at once.
      gather_seconds: seconds for which news of an engine's process wait for further news (`cluster.ray_host`).
      status_seconds: seconds between two writes of the status.
      start_limit: seconds that a start may take (`deadlines.engine_start`).
      silent_limit: seconds for which the event loop may be silent (`telemetry.status`).
      weight_sync_share: share of a step that a weight sync may take.
      hand_over_share: share of a step that handing a batch to the trainer's processes may take.
      memory_bytes: memory of the coordinator's host, in bytes.
    """

    stream_interval: int = 16
    loop_workers: bool = False
    chunk_mib: int = 256
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
    weight_sync_share: float = 0.1
    hand_over_share: float = 0.1
    memory_bytes: float = 1e12

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            possible = 0 <= value < math.inf
            zero = ("staleness", "load_seconds", "engine_start_seconds", "loop_workers")
            if not possible or (value == 0 and item.name not in zero):
                raise protocols.ConfigError(f"settings.{item.name}: {value} is not possible; give a number above 0")


@dataclass(frozen=True)
class Part:
    """One load that grows with the cluster.

    Attributes:
      value: amount, in `unit`.
      limit: amount from which on it delays the run.
      unit: unit of both.
    """

    value: float
    limit: float
    unit: str

    @property
    def ratio(self) -> float:
        """Value over limit: 1 at the limit."""
        return self.value / self.limit


@dataclass(frozen=True)
class Loads:
    """Loads at a number of accelerators.

    Attributes:
      accelerators: number that was asked about.
      engines: rollout instances.
      rates: requests, turns, deltas and generated tokens, each a second.
      coordinator: shares of a core, by purpose.
      weight_sync: seconds of a weight sync, by purpose; bytes and calls overlap, loading follows.
      start: seconds of the start, by purpose; engines start while others are made.
      parts: loads with a limit, by name.
    """

    accelerators: int
    engines: float
    rates: Mapping[str, float]
    coordinator: Mapping[str, float]
    weight_sync: Mapping[str, float]
    start: Mapping[str, float]
    parts: Mapping[str, Part]

    @property
    def bottleneck(self) -> str:
        """The part that is nearest to its limit, or farthest beyond."""
        return max(self.parts, key=lambda name: self.parts[name].ratio)


def grown(known: Mapping[int, float], size: float) -> float:
    """Returns the seconds at a size: a power law between measured sizes, and that of the nearest two beyond them.

    If seconds shrink from one size to the next, by noise, they count as constant. A single size counts as constant,
    too.
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
    """Computes the loads at a number of accelerators.

    Raises:
      ConfigError: the number is below 1.
    """
    if accelerators < 1:
        raise protocols.ConfigError(f"accelerators: {accelerators} is no size of a cluster; give 1 or more")
    times = accelerators / work.accelerators
    engines, trajectories = times * work.engines, times * work.trajectories
    each = trajectories / work.step_seconds
    rates = {
        "requests": each,
        "turns": each * work.turns,
        # A turn's last delta has half an interval's tokens on average.
        "deltas": each * max(work.turns, work.generated_tokens / settings.stream_interval + work.turns / 2),
        "tokens": each * work.generated_tokens,
    }
    workers = engines + hosts(work, settings, times)
    start = {
        "actors": workers * costs.actor,
        "calls": engines * START_CALLS * costs.call,
        "serving": engines * costs.serving,
        "engines": settings.engine_start_seconds,
    }
    coordinator = _coordinator(costs, work, settings, rates, times)
    weight_sync = _weight_sync(costs, work, settings, times)
    tokens = trajectories * work.trained_tokens
    silent, planned = settings.silent_limit, grown(costs.planner, accelerators)
    parts = {
        "coordinator": Part(sum(coordinator.values()), 1.0, "cores"),
        "weight sync": Part(
            max(weight_sync["bytes"], weight_sync["calls"]) + weight_sync["load"],
            settings.weight_sync_share * work.step_seconds,
            "s",
        ),
        "start-up": Part(sum(start.values()), settings.start_limit, "s"),
        "hand-over": Part(
            sum(_hand_over(costs, work, settings, times).values()), settings.hand_over_share * work.step_seconds, "s"
        ),
        "planner": Part(planned, silent, "s"),
        "memory": Part((settings.staleness + 1) * costs.token_bytes * tokens / 1e9, settings.memory_bytes / 1e9, "GB"),
    }
    return Loads(accelerators, engines, rates, coordinator, weight_sync, start, parts)


def _coordinator(
    costs: Costs, work: Work, settings: Settings, rates: Mapping[str, float], times: float
) -> dict[str, float]:
    """Returns the shares of a core that the coordinator's process uses, by purpose."""
    turns, requests, engines = rates["turns"], rates["requests"], times * work.engines
    # Deltas of one engine's process within `gather_seconds` travel together.
    news = rates["deltas"] / (1.0 + settings.gather_seconds * (rates["deltas"] / engines))
    # `turn` already includes the decisions of a single request.
    live = (settings.staleness + 1) * (times * work.trajectories)
    waiting = max(0.0, grown(costs.decisions, live) - grown(costs.decisions, 1))
    workers = engines + hosts(work, settings, engines / work.engines)
    if settings.loop_workers:
        rollouts = {
            "requests": requests * costs.loop_request,
            "turns": turns * costs.loop_turn,
            "deltas": 0.0,
            "tokens": (rates["tokens"] + requests * work.payload_tokens) * costs.loop_token,
        }
    else:
        rollouts = {
            "requests": requests * costs.request,
            "turns": turns * costs.turn,
            "deltas": rates["deltas"] * costs.delta + news * costs.call,
            "tokens": rates["tokens"] * costs.generated_token
            + requests * (work.payload_tokens * costs.payload_token + work.sent_tokens * costs.context_token),
        }
    return {
        **rollouts,
        "scheduler's growth": 2.0 * turns * waiting,
        "batches": requests * (work.trained_tokens * costs.batch_token + costs.batch_rollout),
        "health": engines * (costs.health + costs.call) / settings.health_seconds,
        "status": workers * costs.status / settings.status_seconds,
    }


def _weight_sync(costs: Costs, work: Work, settings: Settings, times: float) -> dict[str, float]:
    """Returns the seconds of a weight sync, by purpose."""
    targets, engines = hosts(work, settings, times), times * work.engines
    count = chunks(work, settings)
    # Levels of the broadcast tree that reaches all hosts.
    depth = math.ceil(math.log(targets + 1.0, FAN_OUT))
    copies = min(FAN_OUT, targets)  # copies that the trainer's host sends
    calls = engines * (costs.engine_update + SYNC_CALLS * costs.call)
    calls += engines * count * (costs.engine_chunk + costs.call)
    calls += targets * count * (costs.host_chunk + RELAY_CALLS * costs.call)
    # Chunks follow each other down the tree, so only the last one pays for all levels.
    return {
        "bytes": copies * work.weight_bytes / settings.link_bytes_per_second * (1.0 + depth / count),
        "calls": calls,
        "load": settings.load_seconds,
    }


def _hand_over(costs: Costs, work: Work, settings: Settings, times: float) -> dict[str, float]:
    """Returns the seconds from a batch's completion until all trainer processes have arrays of it, by purpose.

    Each host of the trainer has one process, which takes the tokens of its own rows, and all outlines.
    """
    trajectories = times * work.trajectories
    training = work.accelerators - work.rollout_accelerators
    processes = max(1.0, times * training / settings.accelerators_per_host)
    tokens = trajectories * work.trained_tokens
    return {
        "put": tokens * costs.batch_token + trajectories * costs.batch_rollout,
        "outlines": trajectories * costs.fetch_rollout,
        "own tokens": tokens * costs.fetch_token / processes,
    }


def hosts(work: Work, settings: Settings, times: float) -> float:
    """Returns the hosts of rollout, on `times` times the accelerators of the work."""
    return max(1.0, times * work.rollout_accelerators / settings.accelerators_per_host)


def chunks(work: Work, settings: Settings) -> int:
    """Returns the chunks of a weight sync."""
    return max(1, math.ceil(work.weight_bytes / (settings.chunk_mib * MIB)))


def reached(costs: Costs, work: Work, settings: Settings, part: str) -> int | None:
    """Returns the fewest accelerators with which a part is at its limit or beyond; None if none up to `MOST` is."""
    # Loads grow with the cluster, so bisection finds the first size at the limit.
    sizes = range(1, MOST + 1)
    place = bisect.bisect_left(sizes, 1.0, key=lambda size: loads(costs, work, settings, size).parts[part].ratio)
    return sizes[place] if place < MOST else None


def first(costs: Costs, work: Work, settings: Settings) -> tuple[str, int] | None:
    """Returns the part that reaches its limit first as the cluster grows, and the number of accelerators."""
    names = loads(costs, work, settings, work.accelerators).parts
    at = {name: found for name in names if (found := reached(costs, work, settings, name)) is not None}
    return min(at.items(), key=lambda item: item[1]) if at else None


def remedy(costs: Costs, work: Work, settings: Settings, accelerators: int, part: str) -> str:
    """Returns a sentence on what to do about a part on this many accelerators, with the resulting numbers."""
    here = loads(costs, work, settings, accelerators)
    load = here.parts[part]
    if load.ratio <= 1.0:
        return f"none needed at {accelerators:,}"
    match part:
        case "coordinator":
            changed = dataclasses.replace(settings, loop_workers=True)
            cores = loads(costs, work, changed, accelerators).parts[part].value
            made = f"rollout.loop_workers, one or more a host: {cores:.2g} cores"
            if cores > BUSY:
                shards = math.ceil(cores / BUSY)
                made = f"rollout.loop_workers and {shards} coordinators, each with a share of the groups (not built)"
        case "weight sync":
            # The smallest sufficient size of chunks, or else what is left with a single chunk.
            changed, after = settings, load
            while after.ratio > 1.0 and chunks(work, changed) > 1:
                changed = dataclasses.replace(changed, chunk_mib=2 * changed.chunk_mib)
                after = loads(costs, work, changed, accelerators).parts[part]
            made = f"rollout.chunk_mib={changed.chunk_mib}: {after.value:.3g} s"
            if after.ratio > 1.0:
                targets = hosts(work, changed, accelerators / work.accelerators)
                made = (
                    f"rollout.chunk_mib={changed.chunk_mib} leaves {after.value:.3g} s; relays that call their host's "
                    f"engines would make it one call for each of {targets:,.0f} hosts instead of "
                    f"{here.engines / targets:.3g} times as many"
                )
        case "start-up":
            whole, room = sum(here.start.values()), settings.start_limit - here.start["engines"]
            if room > 0:
                makers = math.ceil((whole - here.start["engines"]) / room)
                made = (
                    f"{makers} coordinators that make actors (not built), or deadlines.engine_start above {whole:.0f}"
                )
            else:
                made = "raise deadlines.engine_start: engines alone take longer"
        case "hand-over":
            made = f"{math.ceil(load.ratio)} coordinators, each of which hands over its share of the groups (not built)"
        case "planner":
            share = load.value / work.step_seconds
            made = f"search in a process of its own (not built): it takes {share:.2g} of a step's time there"
        case "memory":
            made = f"{math.ceil(load.ratio)} coordinators, each on a host of its own (not built)"
        case _:
            raise ValueError(f"{part!r} is none of {', '.join(here.parts)}")
    return f"{made} (now {load.value:.3g} {load.unit})"
