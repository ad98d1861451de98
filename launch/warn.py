"""Warns of settings that would likely spoil a run, before it starts and in a dry run."""

from __future__ import annotations

import sys

import checks
import wiring
from libra_jax import config as libra_config
from libra_jax.config import advice
from libra_jax.models import config as model_config


def warn(config: libra_config.RunConfig) -> None:
    """Prints a line on stderr for each setting that `advice` warns of.

    Raises:
      LibraError: the model's config.json cannot be read.
    """
    platform = config.trainer.platform
    accelerated = platform in ("cuda", "tpu") or (platform == "auto" and checks.gpus_found() > 0)
    shape = wiring.known_shape(config)
    parameters = model_config.parameter_count(shape) if shape is not None else 0  # which warns of no size
    for sentence in advice.advice(config, parameters=parameters, accelerated=accelerated):
        print(f"warning: {sentence}.", file=sys.stderr)
