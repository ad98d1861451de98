"""optax optimizers and schedules from the config."""

from __future__ import annotations

import optax

from libra_jax import config as config_lib
from libra_jax import protocols


def schedule(config: config_lib.OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the training step.

    The rate rises linearly over `warmup_steps`, then stays (`constant`) or decays to 0 at step `steps` (`cosine`,
    `linear`). The first step already moves: its rate is (step + 1) / warmup_steps of the peak.

    Args:
      config: settings of the optimizer.
      steps: training steps of the whole run.
    """
    peak = config.learning_rate
    # At least 1: optax refuses a decay over no steps, which a run that only warms up would ask for.
    rest = max(1, steps - config.warmup_steps)
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
    }[config.schedule]
    if not config.warmup_steps:
        return after
    rise = optax.linear_schedule(peak / config.warmup_steps, peak, max(1, config.warmup_steps - 1))
    return optax.join_schedules([rise, after], [config.warmup_steps])


def transform(config: config_lib.OptimizerConfig) -> optax.GradientTransformation:
    """Builds the transformation from gradient to update direction: clip, precondition, decay.

    The learning rate is an argument of the apply step. One compiled program then serves the warm start, the run
    and every schedule, and a skipped step still advances the schedule. Weight decay is decoupled (Loshchilov and
    Hutter, arXiv 1711.05101) and, as in torch's AdamW, applies to every parameter.

    Raises:
      ConfigError: weight decay with an optimizer that has none.
    """
    if config.weight_decay and config.name != "adamw":
        raise protocols.ConfigError(
            f"config.optimizer.weight_decay: {config.name} has none; use optimizer.name = 'adamw' or set it to 0"
        )
    # Clipping comes first, so that a huge gradient does not enter Adam's moments.
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    if config.name != "sgd":
        parts.append(optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay))
    return optax.chain(*parts) if parts else optax.identity()
