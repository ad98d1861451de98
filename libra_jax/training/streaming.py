"""The parts of a step that the trainer has begun before the batch was complete (`trainer.stream`).

Sums of gradients do not depend on the order of micro-batches, but for rounding. So a step may begin on finished groups
while others still roll out, if each group's numbers depend on that group alone. `config.run` refuses settings that look
at the whole batch. The update divides by the tokens of the whole batch, which only it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.data import packing
from libra_jax.data import sequences as sequences_lib


@dataclass(frozen=True)
class Whole:
    """What is reported of a whole step: groups, and their examples and advantages in the same order."""

    packed: packing.Packed
    groups: Sequence[protocols.Group]
    examples: Sequence[sequences_lib.Example]
    advantages: Sequence[np.ndarray]
    described: Mapping[str, float]


@dataclass(eq=False)
class Begun:
    """Groups of the next step whose gradients are summed."""

    _parts: list[tuple[tuple[protocols.Group, ...], batch_lib.Prepared]] = field(default_factory=list)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the groups, in order."""
        return tuple(group.group_id for groups, _ in self._parts for group in groups)

    def add(self, batch: protocols.TrainBatch, prepared: batch_lib.Prepared) -> None:
        """Adds groups that have been summed."""
        self._parts.append((batch.groups, prepared))

    def joined(self, last: batch_lib.Prepared, batch: protocols.TrainBatch) -> Whole:
        """Returns the whole step.

        Args:
          last: the groups that were prepared in the step.
        """
        parts = [*self._parts, (batch.rest.groups, last)]
        prepared = [part for _, part in parts]
        counts = {name: np.sum([part.described[name] for part in prepared], axis=0) for name in last.described}
        described = {name: float(count / max(1, total)) for name, (count, total) in counts.items()}
        return Whole(
            packing.joined([part.packed for part in prepared]),
            [group for groups, _ in parts for group in groups],
            [example for part in prepared for example in part.examples],
            [values for part in prepared for values in part.advantages],
            described,
        )
