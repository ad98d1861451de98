"""Assigns unlike accelerators to training and rollout: which kind trains, on how many, and what the others roll out as.

Every assignment of a small grid is ranked by the simulator's lower bound (`simulator.bound`), which knows what each
accelerator computes and reads in a second. The best few are simulated, because a bound knows of no waiting. `planning`
searches far more finely, for one kind of accelerator.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from libra_jax import protocols
from libra_jax.planning.costs import hardware
from libra_jax.planning.forecast import meshes
from libra_jax.simulator import bound, comparison, scripts, settings, workloads

EIGHTHS = (1, 2, 3, 4, 6)
"""Eighths of the accelerators of a kind that are tried as trainers."""

DEGREES = (1, 2, 4)
"""Tensor-parallel degrees that are tried, one for all instances of a kind."""

BOUND_STEPS = 2
"""Steps over which an assignment's bound is computed."""

FILLED = 0.9
"""Share of an instance's cache that its slots fill with contexts of mean length."""

MOST_SLOTS = 256
"""Most slots of an instance."""

FIELD = "--inventory"


@dataclass(frozen=True)
class Assignment:
    """What each accelerator is used for.

    Attributes:
      run: the simulated run that is laid out by it.
      bound_seconds: seconds that no policy's step falls short of.
      simulated_seconds: mean seconds of a simulated step; None before it is simulated.
    """

    run: settings.SimulatedRun
    bound_seconds: float
    simulated_seconds: float | None = None

    def line(self) -> str:
        """Returns a line with the layout and the seconds of a step."""
        simulation, counted = self.run.simulation, dict.fromkeys(self.run.rollout.kinds, 0)
        for kind in self.run.rollout.kinds:
            counted[kind] += 1
        rolling = ", ".join(f"{count} of degree {degree} on {name}" for (degree, name), count in counted.items())
        seconds = f"{self.bound_seconds:.1f} s at least"
        if self.simulated_seconds is not None:
            seconds += f", {self.simulated_seconds:.1f} s simulated"
        return f"{simulation.train_devices} {simulation.hardware} train, {rolling}: {seconds} a step"


def parse(text: Sequence[str]) -> dict[str, int]:
    """Returns how many accelerators of each kind there are, from entries like "h800:32".

    Raises:
      ConfigError: an entry cannot be read, names no sheet or comes twice, or there are fewer than two accelerators.
    """
    counts: dict[str, int] = {}
    for entry in text:
        name, _, count = entry.partition(":")
        if not count.isdigit() or not int(count):
            raise protocols.ConfigError(f"{FIELD}: {entry!r} is no kind and number; write --inventory=h800:32,h20:32")
        if name in counts:
            raise protocols.ConfigError(f"{FIELD}: {name} comes twice; add its numbers up")
        counts[hardware.sheet(name, FIELD).name] = int(count)
    if sum(counts.values()) < 2:
        raise protocols.ConfigError(f"{FIELD}: one accelerator cannot train and roll out; give at least two")
    return counts


def assign(
    run: settings.SimulatedRun,
    inventory: Mapping[str, int],
    top: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Assignment]:
    """Returns the `top` best assignments, the shortest simulated step first.

    Args:
      run: batch, staleness, model and workload; its layout is replaced.
      inventory: accelerators by the name of their sheet.
      top: how many are simulated, at least 1.
      progress: receives a line about each simulation.

    Raises:
      ConfigError: no assignment holds the run's contexts, the run would cut its rollouts short, or it does not keep
        its layout.
    """
    for name, value in (("planner.period", run.planner.period), ("elastic.hybrid", run.elastic.hybrid)):
        if value:
            raise protocols.ConfigError(
                f"config.{name}: {value} changes a run's layout, and {FIELD} compares fixed layouts; set it to 0"
            )
    run = dataclasses.replace(run, scheduler=dataclasses.replace(run.scheduler, max_remaining_tokens=()))
    work, size = comparison.workload(run), run.coordinator.group_size
    tasks = run.steps * run.coordinator.groups_per_step
    rollouts = [work.script(task, sample) for task in range(0, tasks, max(1, tasks // 64)) for sample in range(size)]
    ranked = sorted(
        (Assignment(laid, _bound(laid, work)) for laid in _layouts(run, inventory, rollouts)),
        key=lambda one: one.bound_seconds,
    )
    if not ranked:
        raise protocols.ConfigError(
            f"{FIELD}: no division of these accelerators holds the trainer's state, and a context of "
            f"rollout.max_context = {run.rollout.max_context} beside the weights; give more of them"
        )
    workloads.check_fits(work, ranked[0].run, ranked[0].run.simulation)
    tried: list[Assignment] = []
    for one in ranked[:top]:
        seconds = statistics.fmean(comparison.simulate(one.run).step_seconds)
        tried.append(dataclasses.replace(one, simulated_seconds=seconds))
        progress(f"[{len(tried)}/{min(top, len(ranked))}] {tried[-1].line()}")
    return sorted(tried, key=lambda one: one.simulated_seconds or 0.0)


def _bound(run: settings.SimulatedRun, work: scripts.Workload) -> float:
    short = dataclasses.replace(run, steps=BOUND_STEPS)
    return bound.lower_bound(short, run.simulation, work).step_seconds


def _fewest(run: settings.SimulatedRun, name: str, count: int) -> int:
    """Returns the fewest accelerators of a kind that hold the trainer's state and rows; 0 if `count` do not."""
    simulation = dataclasses.replace(run.simulation, hardware=name)
    model = simulation.cost_model(run.model.lora)
    training = meshes.Training(model, [run.rollout.max_context], meshes.TrainerProperties.from_config(run, model.sheet))
    try:
        return min(mesh.devices for mesh in training.front(count))
    except protocols.ConfigError:  # this kind can still roll out
        return 0


def _layouts(
    run: settings.SimulatedRun, inventory: Mapping[str, int], rollouts: Sequence[scripts.Script]
) -> Iterator[settings.SimulatedRun]:
    """Yields the run under every assignment of the grid that holds its contexts."""
    context = statistics.fmean(script.context_tokens / 2 for script in rollouts)
    splits = {
        (name, max(fewest, count * eighths // 8))
        for name, count in inventory.items()
        if (fewest := _fewest(run, name, count))
        for eighths in EIGHTHS
    }
    choices = list(itertools.product(DEGREES, repeat=len(inventory)))
    for (trains, devices), degrees in itertools.product(sorted(splits), choices):
        remaining = {name: count - devices * (name == trains) for name, count in inventory.items()}
        kinds = tuple(
            (degree, name)
            for (name, count), degree in zip(remaining.items(), degrees, strict=True)
            for _ in range(count // degree)
        )
        # Degrees of a kind that rolls out nothing would yield one layout several times.
        idle = any(
            not remaining[name] and degree != DEGREES[0] for name, degree in zip(remaining, degrees, strict=True)
        )
        if idle or not kinds:
            continue
        rollout = dataclasses.replace(
            run.rollout,
            tensor_parallel=tuple(degree for degree, _ in kinds),
            accelerators=tuple(name for _, name in kinds),
            slots_by_instance=(),
        )
        bounds = workloads.fitted_bounds(rollouts, kinds)
        laid = dataclasses.replace(
            run,
            rollout=rollout,
            scheduler=dataclasses.replace(run.scheduler, max_remaining_tokens=bounds),
            simulation=dataclasses.replace(
                run.simulation, hardware=trains, train_devices=devices, train_mesh=(), slots=()
            ),
        )
        rooms = [
            model.kv_tokens(degree)
            for model, degree in zip(laid.simulation.instance_models(laid), rollout.tensor_parallel, strict=True)
        ]
        if min(rooms) < run.rollout.max_context:
            continue
        slots = tuple(max(1, min(MOST_SLOTS, int(FILLED * room / context))) for room in rooms)
        yield dataclasses.replace(laid, simulation=dataclasses.replace(laid.simulation, slots=slots))
