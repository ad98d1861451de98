"""Lets the trainer begin a step on finished groups while others still roll out (`trainer.stream`).

At max staleness 0 all groups of a step are of one version, so the update is that of a whole batch (periodic asynchrony,
arXiv 2511.18871). Above 0 a step's groups are the same as without streams where all places within the bound are taken.
Only groups whose place another has given up, by being replaced, let a younger one go first (AsyncFlow, arXiv
2507.01663).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from libra_jax import protocols
from libra_jax.scheduling import admission
from libra_jax.trainer_control import recovery as recovery_lib
from libra_jax.utils import run_context


class StreamedGroups:
    """The groups of the next step that the trainer has begun.

    Args:
      run: what the parts of the run share (`trainer`). The recorder gets a span for each call.
      trainer: sums the groups' gradients.
      recovery: restarts the trainer if it dies meanwhile. The restarted one computes the sums in the step.

    Attributes:
      joined_groups: numbers of the groups, in the order in which they were begun.
    """

    def __init__(
        self, run: run_context.RunContext, trainer: protocols.TrainerClient, recovery: recovery_lib.Recovery
    ) -> None:
        config = run.config.trainer
        self.joined_groups: list[int] = []
        self._on = config.stream != "off"
        self._least = config.micro_batch_rows * config.row_tokens if config.stream == "micro_batch" else 0
        self._trainer = trainer
        self._recovery = recovery
        self._recorder = run.recorder
        self._clock = run.clock
        self._seconds = 0.0

    async def begin(
        self, bound: admission.Bound, step: int, finished: Mapping[int, protocols.Group], running: Mapping[int, int]
    ) -> bool:
        """Has the trainer sum the gradients of groups that may join the step already; returns whether there were any.

        Args:
          step: version that trains on them.
          finished: finished groups by number, in the order in which they finished.
          running: dispatch versions of the unfinished groups by number.
        """
        if not self._on:
            return False
        versions = {number: group.dispatch_version for number, group in finished.items()}
        numbers = admission.early(
            bound, step=step, finished=versions, running=running, joined_groups=self.joined_groups
        )
        groups = tuple(finished[number] for number in numbers)
        if not groups or sum(map(_tokens, groups)) < self._least:
            return False
        # Before the call: whether or not it succeeds, these groups are in the step.
        self.joined_groups += numbers
        start, name = self._clock(), self._trainer.name
        self._recorder.status(name, f"training step {step + 1} on the first {len(self.joined_groups)} groups")
        try:
            async with self._trainer.lock:
                await self._accumulate(protocols.TrainBatch(step, groups))
        except protocols.TrainerLost as error:
            await self._recovery.restarted(error)
            return True
        end = self._clock()
        self._seconds += end - start
        self._recorder.span(name, "train step", start, end, {"step": step + 1, "groups": len(groups)})
        self._recorder.status(name, "idle")
        return True

    async def _accumulate(self, batch: protocols.TrainBatch) -> None:
        try:
            await self._trainer.accumulate(batch)
        except asyncio.CancelledError:
            # The run ends, and no step takes these sums: its last checkpoint must not wait for them.
            with contextlib.suppress(protocols.LibraError):
                await self._trainer.abort_step()
            raise

    def take(self) -> tuple[int, ...]:
        """Returns the begun groups of the step that is formed, and forgets them."""
        joined_groups, self.joined_groups = tuple(self.joined_groups), []
        return joined_groups

    def take_seconds(self) -> float:
        """Returns the trainer's seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _tokens(group: protocols.Group) -> int:
    """Returns the tokens of a group, each rollout's prompt included; those that share it fill less of a row."""
    return sum(len(segment.token_ids) for rollout in group.trajectories for segment in rollout.segments)
