"""What a run is given: its surroundings, the workers to make, and the agent that it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.agents import samples as samples_lib
from libra_jax.agents.rewards import scoring
from libra_jax.coordinator import fencing, instances, rollouts
from libra_jax.trainer_control import client


@dataclass(frozen=True)
class RunContext:
    """The surroundings of a run, which its parts share.

    Attributes:
      config: the run's configuration.
      cluster: makes the actors. The coordinator shuts it down when the run ends.
      recorder: writes what happens.
      workdir: the run's folder; checkpoints go there, and the run resumes from there.
      fencing: the run's fencing token in its workdir. A later token ends the run. None disables fencing.
      samples: picks the rollouts that are written as text; None writes none.
      export: directory of the trained parameters in Hugging Face's format; None exports none.
    """

    config: configuration.RunConfig
    cluster: protocols.Cluster
    recorder: protocols.Recorder
    workdir: Path
    fencing: fencing.Epoch | None = None
    samples: samples_lib.Samples | None = None
    export: Path | None = None


@dataclass(frozen=True)
class WorkerSpecs:
    """What the workers of a run are made from.

    Attributes:
      trainer: makes a `protocols.Trainer`.
      engines: each makes a `protocols.RolloutEngine`.
      training_sides: each makes the training side of a hybrid worker (`protocols.Replica`). The last engines are the
        rollout sides, in the same order.
      relays: by host, what makes its weight relay; empty on a single host.
      make_engine: makes the engines that a plan adds; needed with a planner.
      make_trainer: makes the processes of a trainer that may have several or move to others; None: `trainer` alone.
    """

    trainer: protocols.ActorSpec
    engines: Sequence[protocols.ActorSpec]
    training_sides: Sequence[protocols.ActorSpec] = ()
    relays: Mapping[int, protocols.ActorSpec] = field(default_factory=dict)
    make_engine: instances.MakeSpec | None = None
    make_trainer: client.MakeTrainer | None = None

    @property
    def hybrid(self) -> dict[str, protocols.ActorSpec]:
        """Training sides by the name of their worker's engine."""
        engines = self.engines[len(self.engines) - len(self.training_sides) :]
        names = [spec.name for spec in engines]
        return dict(zip(names, self.training_sides, strict=True))


@dataclass(frozen=True)
class Agent:
    """What the policy is asked to do, and how its rollouts are scored.

    Attributes:
      tasks: training and held-out tasks.
      make_environment: returns a fresh environment at each call.
      tokenizer: the policy's tokenizer.
      demonstrator: solves tasks for the warm start; None if there is none.
      reward: scores rollouts; None leaves them the environments' own rewards.
      make_trajectory: returns an empty trajectory (those of the simulator hold no token lists).
    """

    tasks: protocols.TaskSource
    make_environment: Callable[[], protocols.Environment]
    tokenizer: protocols.Tokenizer
    demonstrator: protocols.Demonstrator | None = None
    reward: scoring.Scorer | None = None
    make_trajectory: rollouts.MakeTrajectory = rollouts.make_trajectory
