"""The oracle: C-MLFQ's cost rule with the true remaining lengths, which only a simulator knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra_jax import config as configuration
from libra_jax.scheduling import cmlfq, prefix_tree, state
from libra_jax.scheduling import costs as cost_model


class Oracle(cmlfq.Cmlfq):
    """What the rule would do if it had nothing to learn.

    Args:
      config: its settings.
      costs: of decoding and moving.
      remaining: request id to the tokens that it has still to generate.
      degrees: tensor-parallel degrees of the layout, if known.
    """

    def __init__(
        self,
        config: configuration.SchedulerConfig,
        costs: cost_model.Costs,
        remaining: Callable[[str], int],
        *,
        degrees: Sequence[int] = (),
    ) -> None:
        super().__init__(config, costs, degrees=degrees)
        self._truth = remaining

    masses: tuple[float, ...] = (1.0,)

    def expect(self, request: state.Request) -> prefix_tree.Sketch:
        return (float(self._truth(request.request_id)),)
