"""What both ways to compute a device's experts share: the weights, and the rows sorted by expert.

A row is a token and one of its experts. Letters: D model width, E experts, F an expert's columns, K experts of a token,
N tokens, R = N x K rows; all of one device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from libra_jax.models import collectives

SCOPE = "expert_rows"
"""Name of the loops over a device's rows in compiled programs (`planning.compiled`)."""


class LayerExperts(NamedTuple):
    """Weights of all experts of a layer, in Hugging Face's layout [out, in]."""

    gate_ExFxD: jax.Array
    up_ExFxD: jax.Array
    down_ExDxF: jax.Array


class Sorted(NamedTuple):
    """The rows of this device's experts.

    Attributes:
      order_R: rows, sorted by expert: token x K + the expert's position. Those of other devices' experts come last.
      counts_E: rows of each expert.
    """

    order_R: jax.Array
    counts_E: jax.Array


def by_expert(chosen_NxK: jax.Array, experts: int) -> Sorted:
    """Sorts rows by this device's experts.

    Args:
      chosen_NxK: the experts of each token, among those of all devices; -1 for none.
      experts: number of this device's experts.
    """
    own_R = chosen_NxK.reshape(-1) - collectives.first_index("fsdp", experts)
    own_R = jnp.where((own_R >= 0) & (own_R < experts), own_R, experts)  # behind all of its own
    return Sorted(jnp.argsort(own_R, stable=True), jnp.bincount(own_R, length=experts))
