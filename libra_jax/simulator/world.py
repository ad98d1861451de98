"""A simulated run: the real coordinator, agent loop and scheduler on a virtual clock, among simulated machines.

The result depends only on the configuration, the workload and the scheduler, so a run repeats exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import parts as parts_lib
from libra_jax.coordinator import run as coordinator
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters
from libra_jax.planning import planner
from libra_jax.planning.costs import costs, hardware, request_costs
from libra_jax.planning.forecast import forecast, meshes
from libra_jax.planning.search import plans
from libra_jax.rollouts import rollouts
from libra_jax.scheduling.rivals import known_lengths
from libra_jax.simulator import branching, clock, engine, offload, results, scripts, trainer, training_side, trajectory

MakeScheduler = Callable[[request_costs.SchedulingCosts, known_lengths.Remaining], protocols.Scheduler]
"""A fresh scheduler, handed the costs of the simulated hardware and the truth (for policies that may know it)."""


@dataclass
@config_lib.group("simulation")
class SimulationConfig:
    """The simulated cluster; the rest of a run (batches, layout, limits) is a `config_lib.RunConfig`."""

    # Name of the sheet of the accelerators that train, and that roll out, unless `rollout.accelerators` names others.
    hardware: str = "a800"
    model: str = "Qwen3-14B"  # preset whose shape the costs are computed from
    train_devices: int = config_lib.field(24, gt=0)  # accelerators that train
    # (data, fsdp, tensor) of the accelerators that train, by which a step's time is computed; empty splits the work
    # evenly.
    train_mesh: tuple[int, ...] = ()
    # Requests that each instance decodes at once, in the order of `rollout.tensor_parallel`; one entry is for all
    # instances, and empty takes the slots of `rollout`.
    slots: tuple[int, ...] = config_lib.field((), gt=0)
    # Shares of the sheet's peaks, and fixed times.
    coefficients: costs.Coefficients = field(default_factory=costs.Coefficients)
    # What happens to contexts that leave an instance's cache, moved ones included: "recompute" prefills them again;
    # "offload" keeps them in host memory, from where any instance fetches them (`offload.py`).
    kv_cache: str = config_lib.field("recompute", choices=("recompute", "offload"))
    # Costs that schedulers expect: "exact" are those of this cluster; "alike" takes every accelerator for `hardware`;
    # "config" are those of `scheduler.costs`, as in a real run.
    scheduler_costs: str = config_lib.field("exact", choices=("exact", "alike", "config"))
    warm_seconds: float = 0.0  # seconds of the first compilation on a hybrid worker's training side
    longest_seconds: float = 1e7  # virtual seconds after which the run counts as deadlocked

    def __post_init__(self) -> None:
        config_lib.check(
            not self.train_mesh or (len(self.train_mesh) == 3 and math.prod(self.train_mesh) == self.train_devices),
            "simulation.train_mesh",
            f"{self.train_mesh} is no (data, fsdp, tensor) of simulation.train_devices = {self.train_devices}",
        )

    def instance_slots(self, rollout: config_lib.RolloutConfig) -> tuple[int, ...]:
        """Returns the slots of each instance.

        Raises:
          ConfigError: `slots` has neither one entry nor one for each instance.
        """
        instances, entries = len(rollout.tensor_parallel), len(self.slots)
        config_lib.check(
            entries in (0, 1, instances),
            "simulation.slots",
            f"has {entries} entries for {instances} instances; give one each, or one for all",
        )
        return self.slots * instances if entries == 1 else self.slots or rollout.instance_slots

    def moved(self, by: float) -> Iterator[tuple[str, float]]:
        """Yields each coefficient that matters with its value a share `by` lower, then higher (`costs.moved`)."""
        for name, value in costs.moved(self.coefficients, by):
            if self.kv_cache == "offload" or not name.startswith("host_"):
                yield name, value

    def cost_model(self, lora: config_lib.LoraConfig) -> costs.CostModel:
        """Returns the costs of this cluster, for a model with this adapter.

        Raises:
          ConfigError: there is no such sheet or preset, or the model cannot have the adapter.
        """
        return self._cost_model(self.hardware, "simulation.hardware", lora)

    def instance_models(self, config: config_lib.RunConfig) -> tuple[costs.CostModel, ...]:
        """Returns the costs of each instance, by its accelerator.

        Raises:
          ConfigError: there is no such sheet or preset, or the model cannot have the adapter.
        """
        lora, names = config.model.lora, config.rollout.accelerators
        if not names:
            return (self.cost_model(lora),) * len(config.rollout.tensor_parallel)
        models = {name: self._cost_model(name, "rollout.accelerators", lora) for name in dict.fromkeys(names)}
        return tuple(models[name] for name in names)

    def _cost_model(self, name: str, field_name: str, lora: config_lib.LoraConfig) -> costs.CostModel:
        shape = adapters.adapted(model_config.load_preset(self.model, "simulation.model"), lora)
        return costs.CostModel(hardware.sheet(name, field_name), shape, self.coefficients, merged=lora.sync == "merge")


@dataclass(frozen=True)
class MachineFactories:
    """How the simulated machines are made: fault injection makes some of them another way.

    Attributes:
      engine: makes an engine, given the number of its life from 0 and the arguments of `engine.SimulatedEngine`.
      environment: makes a rollout's environment.
      trainer: makes a trainer, given the number of its life and the arguments of `trainer.SimulatedTrainer`.
      make_training_side: makes the training side of a hybrid worker, given the number of its life and the arguments of
        `training_side.SimulatedTrainingSide`.
      handle: makes the handle of an actor, given its name and the actor.
    """

    engine: Callable[..., engine.SimulatedEngine] = lambda life, **arguments: engine.SimulatedEngine(**arguments)
    environment: Callable[[trajectory.Book], protocols.Environment] = trajectory.ScriptedEnvironment
    trainer: Callable[..., trainer.SimulatedTrainer] = lambda life, **arguments: trainer.SimulatedTrainer(**arguments)
    make_training_side: Callable[..., training_side.SimulatedTrainingSide] = lambda life, **arguments: (
        training_side.SimulatedTrainingSide(**arguments)
    )
    handle: Callable[[str, Any], protocols.ActorHandle] = protocols.DirectHandle


@dataclass(eq=False)
class SimulatedCluster:
    """A `protocols.Cluster` whose actors are plain objects on the one event loop."""

    parts: MachineFactories
    _actors: dict[str, Any] = field(default_factory=dict, init=False)
    _lives: dict[str, int] = field(default_factory=dict, init=False)

    async def spawn(self, spec: protocols.ActorSpec) -> protocols.ActorHandle:
        """Makes the actor in place. Factories other than the simulated machines' are called as they are."""
        # A restarted actor begins another life, with faults of its own.
        life = self._lives[spec.name] = self._lives.get(spec.name, -1) + 1
        # By the factory's name, as a real cluster gets it, so the coordinator cannot tell the difference.
        makers = {
            "libra_jax.simulator.engine:SimulatedEngine": self.parts.engine,
            "libra_jax.simulator.trainer:SimulatedTrainer": self.parts.trainer,
            "libra_jax.simulator.training_side:SimulatedTrainingSide": self.parts.make_training_side,
        }
        if spec.factory in makers:
            actor = makers[spec.factory](life, **spec.arguments)
        else:
            module, _, name = spec.factory.partition(":")
            actor = getattr(importlib.import_module(module), name)(**spec.arguments)
        self._actors[spec.name] = actor
        return self.parts.handle(spec.name, actor)

    async def stop(self, name: str) -> None:
        """Ends the actor; does nothing if the actor has been stopped before."""
        actor = self._actors.pop(name, None)
        if actor is not None:
            await actor.shutdown()

    kill = stop  # a simulated actor holds nothing that could keep it from ending

    async def shutdown(self) -> None:
        """Stops every actor, the last made first."""
        for name in reversed(list(self._actors)):
            await self.stop(name)


def run(
    config: config_lib.RunConfig,
    simulation: SimulationConfig,
    workload: scripts.Workload,
    make_scheduler: MakeScheduler,
    *,
    parts: MachineFactories | None = None,
    recorder: results.StepRecorder | None = None,
    model: costs.Costs | None = None,
) -> results.SimulationResult:
    """Simulates a whole run.

    Args:
      config: batches, staleness, the rollout layout and its limits; without checkpoints, evaluation and warm start.
      simulation: the cluster.
      workload: script of each rollout; all randomness is in the workload and in the scheduler.
      make_scheduler: makes the policy.
      parts: wraps the machines, to inject faults.
      recorder: records the run, for callers that read the records afterwards; None makes one.
      model: costs of everything; None takes the cost model of `simulation`.

    Raises:
      ConfigError: the run asks for something that a simulation cannot do, or the cluster cannot hold it.
      LibraError: what ended the run, in one sentence.
    """
    # Before anything is made: a setting that no one would read must not pass in silence.
    _check(config)
    model, parts, recorder = (
        model or simulation.cost_model(config.model.lora),
        parts or MachineFactories(),
        recorder or results.StepRecorder(),
    )
    book, log, environment = trajectory.Book(workload), trainer.TrainingLog(), parts.environment
    unlike = config.rollout.accelerators
    models_by_accelerator = dict(zip(unlike, simulation.instance_models(config), strict=True)) if unlike else {}
    slots = simulation.instance_slots(config.rollout)
    store = _store(simulation, (model, *models_by_accelerator.values()))
    fleet = engine.Fleet(config, slots, model, simulation.warm_seconds, store, models_by_accelerator)
    specs = [fleet.spec(index, degree) for index, degree in enumerate(config.rollout.tensor_parallel)]
    mesh, planned = _mesh_and_planner(config, simulation, model)
    channels, elastic = training_side.SimulatedChannels(), config.elastic

    def alone(devices: int, lengths: Sequence[int]) -> float:
        """Returns the seconds of a hybrid worker's part of a step; its devices split each layer's matrices."""
        if mesh is None or not lengths:
            return model.train_seconds(lengths, devices)
        return dataclasses.replace(mesh, sizes=(1, 1, devices)).train_seconds(lengths)

    # The last instances are the hybrid ones (`plans.core_degrees`).
    sides = (
        [fleet.training_side(spec, channels, alone) for spec in specs[len(specs) - elastic.hybrid :]]
        if elastic.hybrid
        else []
    )
    spec = protocols.ActorSpec(
        "trainer",
        "libra_jax.simulator.trainer:SimulatedTrainer",
        {
            "model": model,
            "devices": simulation.train_devices,
            "log": log,
            "mesh": mesh,
            "channels": channels,
            "late": elastic.late_factor,
            "late_seconds": elastic.late_min_seconds,
            "masks": config.task.masks,
        },
    )
    simulated_coordinator = coordinator.Coordinator(
        # Nothing is saved, so the folder does not exist.
        parts_lib.CoordinatorContext(config, SimulatedCluster(parts), recorder, pathlib.Path("simulated")),
        parts_lib.WorkerSpecs(spec, specs, sides, make_engine=fleet.spec),
        rollouts.Agent(
            tasks=trajectory.NumberedTasks(),
            make_environment=lambda: environment(book),
            tokenizer=trajectory.CountedText(),
            make_trajectory=book.make,
            run_rollout=branching.run_rollout,
        ),
        make_scheduler(
            request_costs.SchedulingCosts(
                model, transfer=store is not None, models_by_accelerator=models_by_accelerator
            ),
            book.remaining,
        ),
        planned,
    )
    # Wall time of the run alone, without the making of its parts.
    start_time = time.perf_counter()
    with _seldom_collected():
        # No signals: there is nothing to save.
        summary = clock.run(simulated_coordinator.run(), longest=simulation.longest_seconds, signals=False)
    wall = time.perf_counter() - start_time
    return results.from_run(config, summary, recorder, book, log, fleet, wall)


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Makes garbage collection rare inside the block: a run makes few cycles, and each search visits every live
    object."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _check(config: config_lib.RunConfig) -> None:
    for name, off in (("checkpoint", config.checkpoint.every), ("evaluation", config.evaluation.every)):
        config_lib.check(off == 0, f"{name}.every", "must be 0 in a simulated run")
    config_lib.check(config.warm_start.steps == 0, "warm_start.steps", "must be 0 in a simulated run")
    config_lib.check(
        not config.trainer.share_prompt,
        "trainer.share_prompt",
        "must be False in a simulated run, whose trainer computes every prompt",
    )
    config_lib.check(
        not config.rollout.loop_workers,
        "rollout.loop_workers",
        "must be 0 in a simulated run, whose rollouts run in the coordinator's process",
    )


def _store(simulation: SimulationConfig, models: Sequence[costs.Costs]) -> offload.Store | None:
    """Returns what keeps contexts in host memory; None if the run prefills them again."""
    if simulation.kv_cache == "recompute":
        return None
    for model in models:
        sheet = model.sheet if isinstance(model, costs.CostModel) else None
        config_lib.check(
            sheet is not None and sheet.host_memory_bytes > 0 and sheet.host_link_bytes_per_second > 0,
            "simulation.kv_cache",
            f"{sheet.name if sheet else simulation.hardware} has no host memory in its sheet; use 'recompute'",
        )
    return offload.Store()


def _mesh_and_planner(
    config: config_lib.RunConfig, simulation: SimulationConfig, model: costs.Costs
) -> tuple[trainer.OnMesh | None, planner.GlobalPlanner | None]:
    """Returns the trainer's mesh and the planner that changes it; None for each that the run does not have."""
    if not simulation.train_mesh:
        config_lib.check(
            not config.planner.period,
            "simulation.train_mesh",
            "is what a planner starts from: give (data, fsdp, tensor)",
        )
        return None, None
    # Costs that were fitted to a recording know the time of one mesh only, the recorded one.
    config_lib.check(
        isinstance(model, costs.CostModel), "simulation.train_mesh", "needs costs computed from a hardware sheet"
    )
    assert isinstance(model, costs.CostModel)
    data, fsdp, tensor = simulation.train_mesh
    mesh_trainer = meshes.TrainerProperties.from_config(config, model.sheet)
    meshes.check_fits(model, mesh_trainer, (data, fsdp, tensor), "simulation.train_mesh")
    mesh = trainer.OnMesh((data, fsdp, tensor), model, mesh_trainer, config.planner.resize_seconds)
    if not config.planner.period:
        return mesh, None
    # Hybrid workers stay out of plans: the elastic policy switches them, and a plan moves the core's devices only.
    devices = simulation.train_devices + sum(plans.core_degrees(config))
    setting = forecast.PlanConditions.from_config(
        config, model, devices, slots=simulation.instance_slots(config.rollout)
    )
    forecast.check_layout(config, setting)
    begin = plans.from_config(config, (data, fsdp, tensor))
    return mesh, planner.GlobalPlanner(config.planner, setting, begin, masks=config.task.masks)
