"""The per-token arrays of trajectories, with every number checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.training import packing


def examples(
    trajectories: Sequence[protocols.Trajectory],
    policy_version: int,
    model: model_config.TransformerConfig,
    masked: Sequence[bool] | None = None,
) -> list[packing.Example]:
    """Makes the per-token arrays of each trajectory.

    Args:
      trajectories: trajectories to train on.
      policy_version: version that trains. Tokens sampled by this version are `on_version`.
      model: shape of the model.
      masked: True for each trajectory whose tokens are all left out of the loss; None masks none.

    Raises:
      DataError: a trajectory's lists differ in length, a token is outside the vocabulary, a log-probability is not a
        number, or its experts are not the model's; the message names the trajectory.
    """
    made = []
    for trajectory, out in zip(trajectories, masked or [False] * len(trajectories), strict=True):
        name = trajectory.trajectory_id
        example = packing.Example(
            sequence_id=name,
            tokens_N=np.array(trajectory.token_ids, np.int32),
            mask_N=np.array(trajectory.loss_mask, bool),
            behaviour_N=np.array(trajectory.log_probs, np.float32),
            on_version_N=np.array(trajectory.policy_versions, np.int64) == policy_version,
            routing_RxW=_routing(trajectory, model),
        )
        lengths = {len(example.tokens_N), len(example.mask_N), len(example.behaviour_N), len(example.on_version_N)}
        if len(lengths) > 1:
            raise protocols.DataError(
                f"trajectory {name}: its per-token lists have different lengths {sorted(lengths)}."
            )
        # No device raises an error for a token outside the embedding table.
        if len(example.tokens_N) and not 0 <= example.tokens_N.min() <= example.tokens_N.max() < model.vocab_size:
            raise protocols.DataError(
                f"trajectory {name}: holds a token id outside the model's vocabulary of {model.vocab_size}; tokenizer "
                "and model do not belong together."
            )
        if not np.isfinite(example.behaviour_N).all():
            raise protocols.DataError(f"trajectory {name}: the engine returned a log-probability that is not a number.")
        example.mask_N[:] &= not out
        made.append(example)
    return made


def _routing(trajectory: protocols.Trajectory, model: model_config.TransformerConfig) -> np.ndarray | None:
    """Returns the experts of a trajectory's first tokens, [R, W], or None if it has none.

    Raises:
      DataError: they are not experts of this model, a layer has one twice, or they are more than the tokens.
    """
    if not trajectory.routing:
        return None
    name, dtype = trajectory.trajectory_id, np.dtype(model.routing_dtype)
    width = model.routing_width * dtype.itemsize
    if len(trajectory.routing) > len(trajectory.token_ids) or {*map(len, trajectory.routing)} != {width}:
        raise protocols.DataError(
            f"trajectory {name}: the engine returned experts for {len(trajectory.routing)} of its "
            f"{len(trajectory.token_ids)} tokens, of {sorted({*map(len, trajectory.routing)})} bytes each; "
            f"the model's layers and experts take {width}."
        )
    found_RxW = np.frombuffer(b"".join(trajectory.routing), dtype).reshape(-1, model.routing_width)
    # By pairs of experts: sorting each token's takes ten times as long, and a batch may hold gigabytes.
    chosen_KxRxL = np.ascontiguousarray(np.moveaxis(found_RxW.reshape(len(found_RxW), model.num_layers, -1), -1, 0))
    for first, second in itertools.combinations(chosen_KxRxL, 2):
        if (same_RxL := first == second).any():
            # Rows of zeros, for one, which an engine returns where it has filled in nothing.
            token, layer = np.argwhere(same_RxL)[0]
            raise protocols.DataError(
                f"trajectory {name}: the engine returned an expert twice in layer {layer} of token {token}; each token "
                f"takes {model.experts_per_token} different experts of a layer."
            )
    if found_RxW.max() >= model.num_experts:
        raise protocols.DataError(
            f"trajectory {name}: the engine returned expert {found_RxW.max()}, and the model has {model.num_experts}."
        )
    return found_RxW
