"""Defines the log-probability of a sampled token, for the engine that samples it and the trainer that scores it again.

- The engine returns *processed* log-probs: the log-softmax of logits / temperature, natural logarithm, of the very
  distribution the token was drawn from. Raw log-probs (vLLM's default) are those of temperature 1.
- Temperature is the only thing that shapes the distribution. top_p and top_k renormalise over a set of tokens that
  the trainer does not know. A ratio of the trainer's probability to the engine's would be biased.
- The trainer scores with the same temperature: log-softmax of logits / `rollout.temperature`.
- Temperature 0 (evaluation) is greedy; its log-probs are those of temperature 1 and are never trained on.
"""

from __future__ import annotations

from libra_jax import config as config_lib
from libra_jax import protocols

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for log-probs after temperature scaling."""


def check(rollout: config_lib.RolloutConfig, algorithm: config_lib.AlgorithmConfig) -> None:
    """Raises ConfigError if the sampling's log-probs cannot be compared with the trainer's.

    Every loss here is a function of the ratio of the current policy to the sampling (or proximal) policy. An importance
    correction is such a ratio, too. A renormalised behaviour distribution would bias all of these ratios.

    Raises:
      ConfigError: top_p or top_k is on; the message names the fields.
    """
    truncating = []
    if rollout.top_p < 1:
        truncating.append(f"config.rollout.top_p = {rollout.top_p}")
    if rollout.top_k > 0:
        truncating.append(f"config.rollout.top_k = {rollout.top_k}")
    if not truncating:
        return
    if algorithm.correction != "none":
        partner = f"config.algorithm.correction = {algorithm.correction!r}"
    else:
        partner = f"config.algorithm.loss = {algorithm.loss!r}"
    raise protocols.ConfigError(
        f"{' and '.join(truncating)} cannot be combined with {partner}, whose probability ratios would be biased: "
        "set top_p to 1.0 and top_k to 0 and shape sampling with rollout.temperature alone"
    )
