"""A simulated trainer: its steps, snapshots and mesh changes take time, and it logs what it was given."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from libra_jax import protocols
from libra_jax.planning.costs import costs
from libra_jax.planning.forecast import meshes
from libra_jax.simulator import training_side


@dataclass
class TrainingLog:
    """Log of what a trainer was given.

    Attributes:
      trained: by trajectory id, the number of steps that contained its gradient.
      parts: by step, the trajectories whose gradients each hybrid worker computed, and, as "", the core trainer.
      staleness: of each group, in the order of training: the step's version minus the group's dispatch version.
      generated: sampled tokens in the trained trajectories.
      busy_seconds: seconds spent in training steps.
    """

    trained: dict[str, int] = field(default_factory=dict)
    parts: list[Mapping[str, Sequence[str]]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    generated: int = 0
    busy_seconds: float = 0.0


@dataclass(frozen=True)
class OnMesh:
    """A trainer whose steps take the time of its mesh (`planning.forecast.meshes`).

    Attributes:
      sizes: data, fsdp and tensor.
      model: costs of the accelerators.
      trainer: rows and memory.
      resize_seconds: seconds of a change of the mesh.
    """

    sizes: tuple[int, int, int]
    model: costs.CostModel
    trainer: meshes.TrainerProperties
    resize_seconds: float

    def train_seconds(self, lengths: Sequence[int], *, update: bool = True) -> float:
        """Returns the seconds of a step on sequences of these lengths; without `update`, of its sums alone."""
        training = meshes.Training(self.model, lengths, self.trainer)
        return training.seconds(*self.sizes) if update else training.sum_seconds(*self.sizes)


@dataclass(eq=False)
class SimulatedTrainer:
    """A `protocols.Trainer` on virtual time.

    Attributes:
      model: costs of training and weight syncs.
      devices: accelerators that train.
      mesh: mesh of the devices; None splits the work evenly.
      channels: gradient channels to hybrid workers.
      late: as `elastic.late_factor`.
      late_seconds: as `elastic.late_min_seconds`.
      masks: tells which rollouts are not trained; None trains all.
    """

    model: costs.Costs
    devices: int
    log: TrainingLog
    mesh: OnMesh | None = None
    channels: training_side.SimulatedChannels = field(default_factory=training_side.SimulatedChannels)
    late: float = 2.0
    late_seconds: float = 1.0
    masks: training_side.Masks | None = None
    _begun: tuple[int, ...] = field(default=(), init=False)
    _target_sizes: protocols.MeshSizes | None = field(default=None, init=False)
    _version: int = field(default=0, init=False)

    async def begin_resize(self, sizes: protocols.MeshSizes) -> protocols.ResizeEstimate:
        """Compiles beside training, which costs nothing here."""
        if self.mesh is None:
            raise protocols.ConfigError("config.simulation.train_mesh: a trainer without a mesh cannot change it")
        self._target_sizes = sizes
        return protocols.ResizeEstimate(0, 0, 0)

    async def resize_progress(self) -> protocols.ResizeProgress:
        """Returns ready: there is nothing to wait for."""
        return protocols.ResizeProgress(1, 1, ready=True)

    async def finish_resize(self, seconds: float) -> protocols.ResizePhases:
        """Continues on the other mesh, once the state has moved."""
        assert self.mesh is not None
        assert self._target_sizes is not None
        took, sizes = self.mesh.resize_seconds, self._target_sizes
        await asyncio.sleep(took)
        self.mesh = dataclasses.replace(self.mesh, sizes=(sizes.data, sizes.fsdp, sizes.tensor))
        self.devices, self._target_sizes, self._begun = sizes.devices, None, ()
        return protocols.ResizePhases(0.0, 0.0, took, 0)

    async def cancel_resize(self) -> None:
        """Keeps the present mesh."""
        self._target_sizes = None

    async def start(self) -> protocols.TrainerInfo:
        """Starts at version 0; forgets what a lost trainer was given, because no state contains it any more."""
        log, self._begun = self.log, ()
        log.trained.clear()
        log.parts.clear()
        log.staleness.clear()
        log.generated = 0
        # `busy_seconds` stays, because the lost trainer has spent them.
        sizes = (self.devices, 1, 1) if self.mesh is None else self.mesh.sizes
        mesh = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
        return protocols.TrainerInfo(0, self.model.parameters, mesh, "simulated")

    async def warm_start_step(self, sequences: Sequence[protocols.Trajectory]) -> Mapping[str, float]:
        """Takes one step's time on given sequences."""
        await self._train([training_side.own_tokens(sequence) for sequence in sequences])
        return {"loss": 0.0}

    async def train_step(
        self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()
    ) -> Mapping[str, float]:
        """Takes one step's time and logs the batch. Computes late shares itself."""
        early_trajectories = training_side.trained(batch.of(batch.begun), self.masks)
        if self._begun != batch.begun:
            await self._train([training_side.own_tokens(trajectory) for trajectory in early_trajectories], update=False)
        self._begun = ()
        trajectories = training_side.trained(batch.rest, self.masks)
        lengths = [training_side.own_tokens(trajectory) for trajectory in trajectories]
        core, parts = training_side.split(lengths, shares)
        computed = {"": list(core)}
        # The core's own part first, as in a real step: shares arrive meanwhile and are added at its end.
        start_time = asyncio.get_running_loop().time()
        await self._train([lengths[index] for index in core])
        core_seconds = asyncio.get_running_loop().time() - start_time
        counts = {"shares/of": float(len(lengths)), "shares/micro_batches": 0.0, "shares/late": 0.0}
        sent = [share for share in shares if parts[share.worker]]  # an empty share is never sent
        collected_parts = await self._collect(batch.policy_version, sent, core_seconds)
        if shares:
            counts["shares/wait_seconds"] = asyncio.get_running_loop().time() - start_time - core_seconds
        for share in sent:
            part = collected_parts.get(share.worker)
            if part is not None:
                counts["shares/micro_batches"] += training_side.counted(part, lengths)
                computed[share.worker] = list(part)
                continue
            # A late share costs time and never a gradient: the core computes it itself.
            counts["shares/late"] += 1.0
            counts[f"shares/late/{share.worker}"] = 1.0
            await self._train([lengths[index] for index in parts[share.worker]])
            computed[""] += parts[share.worker]
        names = [trajectory.trajectory_id for trajectory in trajectories]
        # Every step's rollouts by who computed them, so that tests can tell a gradient lost or taken twice.
        of_step = {who: [names[index] for index in part] for who, part in computed.items()}
        of_step[""] += [trajectory.trajectory_id for trajectory in early_trajectories]
        self.log.parts.append(of_step)
        for name in itertools.chain.from_iterable(self.log.parts[-1].values()):
            self.log.trained[name] = self.log.trained.get(name, 0) + 1
        self.log.generated += sum(trajectory.sampled_tokens for trajectory in (*early_trajectories, *trajectories))
        self.log.staleness.extend(batch.policy_version - group.dispatch_version for group in batch.groups)
        self._version += 1
        return {"loss": 0.0, **(counts if shares else {})}

    async def accumulate(self, batch: protocols.TrainBatch) -> None:
        """Takes the time of some groups of the next step."""
        lengths = [training_side.own_tokens(one) for one in training_side.trained(batch, self.masks)]
        await self._train(lengths, update=False)
        self._begun += tuple(group.group_id for group in batch.groups)

    async def _collect(
        self, version: int, shares: Sequence[protocols.Share], own_seconds: float
    ) -> dict[str, Sequence[int]]:
        """Collects all shares that come in time, as `training.shares` does; returns the sequences of each."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(self.late_seconds, self.late * own_seconds)
        collected_parts: dict[str, Sequence[int]] = {}
        late = False
        for share in shares:
            now = loop.time()
            # A late share takes no time from the shares after it.
            limit = max(deadline, now + self.late_seconds) if late else deadline
            part = await self.channels.receive(share, version, limit - now)
            if part is None:
                # As in a real step: a late worker gets no further share until it has joined again.
                self.channels.close(share.worker)
                late = True
            else:
                collected_parts[share.worker] = part
        return collected_parts

    async def _train(self, lengths: Sequence[int], *, update: bool = True) -> None:
        # A step of masked rollouts only, or of shares only, has no work of its own and no fixed time either.
        if not lengths:
            return
        if self.mesh is None:
            seconds = self.model.train_seconds(lengths, self.devices)
        else:
            seconds = self.mesh.train_seconds(lengths, update=update)
        await asyncio.sleep(seconds)
        self.log.busy_seconds += seconds

    async def policy_version(self) -> int:
        """Returns the held version."""
        return self._version

    async def abort_step(self) -> bool:
        """Returns False: no scheduler stops a simulation."""
        return False

    async def _called(self, call: str) -> None:
        """Begins a call that fault injection may break: it overrides this method."""

    async def listen(self, worker: str, generation: int) -> Mapping[str, Any]:
        """Opens a channel."""
        await self._called("listen")
        # Ends the connection under a former generation; that worker has to join again.
        self.channels.close(worker)
        self.channels.listening[worker] = generation
        return {"generation": generation}

    async def connect(self, worker: str, generation: int, address: Mapping[str, Any]) -> None:
        """Does nothing: the channel is ready when the hybrid worker has joined."""
        await self._called("connect")

    async def dismiss(self, worker: str) -> None:
        """Closes a channel."""
        await self._called("dismiss")
        self.channels.close(worker)

    async def open_weights(self, policy_version: int, destinations: Sequence[protocols.WeightDestination] = ()) -> int:
        """Returns 1: a snapshot is one chunk."""
        return 1

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        """Gathers the snapshot."""
        await self._called("stage_weights")
        await asyncio.sleep(self.model.gather_seconds(self.devices))
        return protocols.WeightChunk(policy_version, index, 1, (), self.model.sync_bytes, {"kind": "simulated"})

    async def close_weights(self, policy_version: int) -> None:
        """Does nothing: a snapshot holds no memory here."""

    async def save(self, path: str) -> NoReturn:
        """Refuses: a simulated run has no parameters, and is repeated instead of resumed."""
        raise protocols.ConfigError(
            f"{path}: a simulated run has no parameters to save, restore or export; set config.checkpoint.every to 0"
        )

    restore = export = save

    async def wait_saved(self) -> None:
        """Does nothing: nothing is ever being saved."""

    async def shutdown(self) -> None:
        """Does nothing: the trainer holds nothing."""
