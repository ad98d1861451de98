"""Harnesses: any agent, unmodified, as the environment of a rollout. It asks the run's gateway for model outputs."""

from libra_jax.harness.factory import environment

__all__ = ["environment"]
