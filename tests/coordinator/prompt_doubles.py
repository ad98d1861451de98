"""Tasks that come again, rewards that depend on nothing but the task's id, and a trainer that counts rollouts."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

import coordinator_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import checkpoints

TASKS = 7


class Passes(doubles.Tasks):
    """Seven tasks, posed again in each pass."""

    def __len__(self) -> int:
        return TASKS

    def task(self, index: int) -> protocols.Task:
        name = f"task-{index % TASKS}"
        payload = {"index": index % TASKS}
        return protocols.Task(
            f"{name}-pass{index // TASKS}", payload, repeats=f"{name}-pass0" if index >= TASKS else ""
        )


class Named(doubles.TwoTurns):
    """A tool that takes long for some tasks; the reward is drawn from the task's id, so each pass has another one."""

    tool_seconds = staticmethod(lambda index: 1.0 if index in (2, 5) else 0.05 * index)

    async def reset(self, task: protocols.Task):
        self._name = task.prompt_id
        return await super().reset(task)

    async def step(self, output: str) -> protocols.StepResult:
        result = await super().step(output)
        reward = float(hashlib.sha256(self._name.encode()).digest()[0] % 2)
        return protocols.StepResult(done=True, reward=reward) if result.done else result


class SizedTrainer(doubles.RecordingTrainer):
    """Remembers number and size of each group that it trained on, and the replayed rollout in it with its staleness."""

    async def train_step(self, batch: protocols.TrainBatch, shares: Any = ()) -> Any:
        sizes = self.state.setdefault("sizes", {})
        result = await super().train_step(batch, shares)
        for group in batch.groups:
            names = [trajectory.trajectory_id for trajectory in group.rollouts]
            assert names == [f"{group.task.prompt_id}/{sample}" for sample in range(len(names))]
            assert group.task.prompt_id not in sizes, "trained twice"
            sizes[group.task.prompt_id] = [group.group_id, len(names)]
            for trajectory in group.trajectories[len(names) :]:
                assert trajectory.replayed, "one of its own stands behind a replayed one"
                assert trajectory.reward == 1.0, "replayed, and no success"
                oldest = min(version for version in trajectory.policy_versions if version >= 0)
                replays = self.state.setdefault("replays", {})
                replays[group.task.prompt_id] = [trajectory.trajectory_id, batch.policy_version - oldest]
        return result


def make_trainer(log: str) -> SizedTrainer:
    return SizedTrainer(0.5, 3, log)


def make_bench(config: config_lib.RunConfig, workdir: Path) -> doubles.Bench:
    return doubles.Bench(
        config,
        workdir,
        make_environment=Named,
        tasks=Passes(),
        trainer_factory="prompt_doubles:make_trainer",
    )


def run_for(bench: doubles.Bench, seconds: float) -> bool:
    """Runs for a while, and tells whether the run has ended. Else it is dropped where it stands, as by a kill."""

    async def main() -> bool:
        run = asyncio.ensure_future(bench.coordinator.run())
        await asyncio.wait({run}, timeout=seconds)
        if run.done():
            run.result()
            return True
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        return False

    return doubles.run_on_clock(main())


def run_killed(config: config_lib.RunConfig, workdir: Path, seconds: float, moments: random.Random) -> doubles.Bench:
    """Runs to the end, killed again and again; `seconds` is how long it takes without. Returns the last run."""
    resumed: list[int] = []
    # Longer each time, because a run that never gets from one checkpoint to the next does not end.
    while not run_for(
        bench := make_bench(config, workdir), (moments.uniform(0.1, 0.3) + 0.02 * len(resumed)) * seconds
    ):
        resumed.append(checkpoints.newest_step(workdir))
    assert len({step for step in resumed if 0 < step < config.steps}) > 1, "the kills came too early or too late"
    return bench
