"""The objective as the publications write it, over trajectories in float64, and ours called on the same batch.

Letters: B rows, T tokens.
"""

import math

import jax.numpy as jnp
import numpy as np

from libra_jax.algorithms import batch_statistics, objective


def evaluate(config, batch, *, untrained=0.0, keep=slice(None), log_probs=None):
    """The objective of the batch, or of the rows in `keep` with the others left as padding."""
    fields, segments = batch.packed(untrained)
    kept = np.zeros_like(segments)
    kept[keep] = 1
    arrays = {name: jnp.asarray(value) for name, value in fields.items()}
    return objective.policy_objective(
        config,
        log_probs_BxT=arrays["log_probs"] if log_probs is None else log_probs,
        behaviour_log_probs_BxT=arrays["behaviour"],
        proximal_log_probs_BxT=arrays["proximal"],
        reference_log_probs_BxT=arrays["reference"],
        advantages_BxT=arrays["advantages"],
        entropy_BxT=arrays["entropy"],
        mask_BxT=arrays["mask"],
        segments_BxT=jnp.asarray(segments * kept),
        same_version_BxT=arrays["same_version"] == 1.0,
        max_segments=batch.max_segments,
        statistics={
            name: jnp.full(segments.shape, {"low": 0.8, "high": 1.3}.get(name, 0.0), jnp.float32)
            for name in batch_statistics.NAMES.get(config.loss, ())
        },
    )


def token_policy_loss(config, ratio, frozen_ratio, advantage, log_prob):
    """Loss of one token from its importance ratio; what is written with `frozen_ratio` carries no gradient."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.loss == "cispo":
        return -min(max(frozen_ratio, low), high) * advantage * log_prob
    if config.loss == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -advantage * (4 / tau) / (1 + math.exp(-tau * (ratio - 1)))
    loss = max(-ratio * advantage, -min(max(ratio, low), high) * advantage)
    if config.dual_clip and advantage < 0:
        loss = min(loss, -config.dual_clip * advantage)
    return loss


def sequence_ratio(anchor, log_probs, trained):
    return math.exp(sum(log_probs[t] - anchor[t] for t in trained) / len(trained))


def kl_value(kind, log_prob, reference):
    d = reference - log_prob
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[kind]


def kl_with_gradient(estimator, log_prob, frozen, reference):
    if not estimator.endswith("+"):
        return kl_value(estimator, log_prob, reference)
    gradient_part = kl_value("k2", log_prob, reference) - kl_value("k2", frozen, reference)
    return kl_value(estimator[:2], frozen, reference) + gradient_part


def sequence_terms(config, trajectory, log_probs, frozen):
    """(policy, kl, entropy) per trained token of one trajectory."""
    trained = [t for t in range(len(log_probs)) if trajectory["mask"][t] > 0]
    behaviour, proximal = trajectory["behaviour"], trajectory["proximal"]
    decoupled = config.objective == "decoupled"
    anchor = proximal if decoupled else behaviour
    cap = config.correction_cap
    for t in trained:
        if config.loss == "gspo":
            ratio = sequence_ratio(anchor, log_probs, trained)
            frozen_ratio = sequence_ratio(anchor, frozen, trained)
            importance = sequence_ratio(behaviour, proximal, trained) if decoupled else frozen_ratio
        else:
            ratio, frozen_ratio = math.exp(log_probs[t] - anchor[t]), math.exp(frozen[t] - anchor[t])
            importance = math.exp(proximal[t] - behaviour[t]) if decoupled else frozen_ratio
        weight = {"none": 1.0, "truncated": min(importance, cap), "masked": importance * (importance <= cap)}[
            config.correction
        ]
        if not decoupled and config.correction != "none":  # the ratio is the weight: replace it, do not repeat it
            if config.correction == "truncated":
                ratio, frozen_ratio = ratio * weight / importance, weight
                weight = 1.0
            else:
                weight = float(weight > 0)
        policy = weight * token_policy_loss(config, ratio, frozen_ratio, trajectory["advantages"][t], log_probs[t])
        kl = kl_with_gradient(config.kl_estimator, log_probs[t], frozen[t], trajectory["reference"][t])
        yield policy, kl, trajectory["entropy"][t]


def reference_loss(config, batch, log_probs=None):
    """(loss_sum, count); `log_probs` replaces the current log-probs, trajectory by trajectory."""
    log_probs = [item["log_probs"] for item in batch.trajectories] if log_probs is None else log_probs
    total, count = 0.0, 0
    for trajectory, values in zip(batch.trajectories, log_probs, strict=True):
        terms = list(sequence_terms(config, trajectory, values, trajectory["log_probs"]))
        if not terms:
            continue
        kl_coefficient = 0.0 if config.kl_in_reward else config.kl_coefficient
        token_losses = [p + kl_coefficient * k - config.entropy_coefficient * e for p, k, e in terms]
        if config.aggregation == "token_mean":
            total, count = total + sum(token_losses), count + len(token_losses)
        elif config.aggregation == "sequence_mean":
            total, count = total + sum(token_losses) / len(token_losses), count + 1
        else:
            total, count = total + sum(token_losses) / config.sequence_length_constant, count + 1
    return total, count


def places(batch):
    """(row, segment) of each trajectory."""
    seen = [0] * batch.shape[0]
    for row in batch.rows:
        seen[row] += 1
        yield row, seen[row]
