"""Detects steps without anything to learn from, and notes the likely reason once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from libra_jax import config as configuration

PATIENCE = 3
"""Steps in a row without anything to learn from, before the note."""


class Watch:
    """Looks at the metrics of each training step.

    A step has nothing to learn from in three cases: no group has a gradient, the gradient norm is 0, or every rollout
    had the same reward. Only steps of real trainers count, because simulated ones report no gradient norm.

    Args:
      config: the run's configuration (`algorithm`, `coordinator`).
      note: takes the note for the person watching.
    """

    def __init__(self, config: configuration.RunConfig, note: Callable[[str], None]) -> None:
        self._config = config
        self._note = note
        self._in_a_row = 0
        self._told = ""

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks a step's metrics. After `PATIENCE` useless steps in a row, notes the reason, once for each reason."""
        if not _nothing_to_learn(metrics):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row < PATIENCE:
            return
        reason, sentence = self._reason(metrics)
        if reason != self._told:
            self._told = reason
            # A KL or entropy term moves the weights even if all rewards are equal.
            had = "learned from KL and entropy terms alone" if metrics["grad_norm"] else "had nothing to learn from"
            self._note(f"Steps {step - PATIENCE + 1} to {step} {had}: {sentence}")

    def _reason(self, metrics: Mapping[str, float]) -> tuple[str, str]:
        """Returns a short name of the last step's reason, and its sentence."""
        advantage, size = self._config.algorithm.advantage, self._config.coordinator.group_size
        if metrics["rollout/masked"] == 1:
            return "masked", (
                "every rollout was cut off at a limit and masked (task.cut_off). Raise task.max_seconds or "
                "rollout.max_context, or set task.cut_off=zero."
            )
        if size == 1 and advantage in configuration.GROUP_ADVANTAGES:
            return "group_size", (
                f"coordinator.group_size is 1, so {advantage} compares a rollout with nobody. Raise it, or use "
                "algorithm.advantage=reinforce_plus_plus."
            )
        if metrics["reward/std"] == 0:
            return "reward", (
                f"every rollout had the reward {metrics['reward/mean']:g}; with equal rewards nothing is better. Look "
                "at how task.environment and reward.functions score, and at tasks that are too hard or too easy."
            )
        if metrics.get("groups/without_gradient") == 1:
            return "groups", (
                "rewards differ between prompts, never within a group. Raise coordinator.group_size or "
                "rollout.temperature, or take tasks that the policy solves sometimes."
            )
        return "gradient", (
            "the gradient norm is 0 although rewards differ. Look at clip/* and correction/* in metrics.jsonl: "
            "algorithm.clip_low, clip_high and correction_cap may drop every token."
        )


def _nothing_to_learn(metrics: Mapping[str, float]) -> bool:
    if "grad_norm" not in metrics:
        return False
    return metrics.get("groups/without_gradient") == 1 or metrics["grad_norm"] == 0 or metrics["reward/std"] == 0
