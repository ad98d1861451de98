"""optax optimizers and schedules by name, or by functions of the user's own.

Every optimizer is a function (config, **arguments) -> optax.GradientTransformation, whose updates are subtracted from
the parameters after a multiplication with the learning rate. The weights of all layers are stacked: [L, out, in], or
[L, E, out, in] of experts.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from libra_jax import config as config_lib
from libra_jax.models.adapters import lora
from libra_jax.utils import resolving

PyTree = Any

TABLES = ("embed_tokens", "lm_head")
"""Names of the modules of the embedding and of the output projection."""


# Schedules ------------------------------------------------------------------------------------------------------------


def schedule(config: config_lib.OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the training step.

    The rate rises linearly over `warmup_steps`. Then it stays (`constant`), falls to `min_ratio` of the peak at step
    `steps` (`cosine`, `linear`), or stays and falls linearly in the last `decay_share` of all steps (`wsd`: warm-up,
    stable, decay; arXiv 2404.06395). The first step already moves: its rate is (step + 1) / warmup_steps of the peak.

    Args:
      steps: training steps of the whole run.

    Raises:
      ConfigError: a schedule of the user's own cannot be made, or is no function.
    """
    if ":" in config.schedule:
        return _users_schedule(config, steps)
    peak, floor = config.learning_rate, config.min_ratio * config.learning_rate
    # At least 1: optax refuses a decay over no steps, which a run that only warms up would ask for.
    rest = max(1, steps - config.warmup_steps)
    decay = min(rest, max(1, round(config.decay_share * steps)))
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.min_ratio),
        "linear": optax.linear_schedule(peak, floor, rest),
        "wsd": optax.linear_schedule(peak, floor, decay, transition_begin=rest - decay),
    }[config.schedule]
    if not config.warmup_steps:
        return after
    rise = optax.linear_schedule(peak / config.warmup_steps, peak, max(1, config.warmup_steps - 1))
    return optax.join_schedules([rise, after], [config.warmup_steps])


def _users_schedule(config: config_lib.OptimizerConfig, steps: int) -> optax.Schedule:
    """Calls the function that `config.schedule` names. Each rate is checked, because a NaN would end the policy."""
    name, field = config.schedule, "optimizer.schedule"
    arguments = {"config": config, "steps": steps, **config.schedule_arguments}
    function = resolving.call(resolving.resolve(name, field), name, arguments, "optimizer.schedule_arguments")
    display_name = resolving.shown(name)
    config_lib.check(
        callable(function), field, f"{display_name} returned {function!r}, not a function from the step to the rate"
    )

    def rate(step: int) -> float:
        with resolving.named(name, field, f"the schedule at step {step}"):
            value = float(function(step))
        problem = f"{display_name} gave a learning rate of {value} at step {step}; it must be finite and not negative"
        config_lib.check(math.isfinite(value) and value >= 0, field, problem)
        return value

    return rate


# Optimizers -----------------------------------------------------------------------------------------------------------


def transform(config: config_lib.OptimizerConfig) -> optax.GradientTransformation:
    """Builds the transformation from gradient to update direction: clip, precondition, decay.

    The learning rate is an argument of the apply step. One compiled program then serves the warm start, the run
    and every schedule, and a skipped step still advances the schedule. Weight decay is decoupled (Loshchilov and
    Hutter, arXiv 1711.05101).

    Raises:
      ConfigError: the optimizer does not take `config.arguments`, or a function of the user's own is none.
    """
    # Clipping comes first, so that a huge gradient does not enter the moments.
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    # Plain gradient descent has no part of its own, as in checkpoints of earlier versions.
    if config.name != "sgd" or config.arguments:
        parts.append(_preconditioner(config))
    if config.weight_decay:
        # A mask of optax would change the state's structure, and older checkpoints could not be restored.
        def decayed(updates: PyTree, params: PyTree) -> PyTree:
            return jax.tree_util.tree_map_with_path(
                lambda path, update, weight: (
                    update + config.weight_decay * weight if config.decay_all or decays(path) else update
                ),
                updates,
                params,
            )

        parts.append(optax.stateless(decayed))
    return optax.chain(*parts) if parts else optax.identity()


def decays(path: tuple[Any, ...]) -> bool:
    """Returns True if weight decay applies to the parameter at this path: to all but norms, biases, the embedding.

    The output projection decays if it has weights of its own. Adapters consist of matrices, which decay.
    """
    *modules, leaf = (str(getattr(key, "key", key)) for key in path)
    if leaf in lora.LEAVES:
        return True
    return leaf != "bias" and not any(name.endswith("norm") or name == "embed_tokens" for name in modules)


def _preconditioner(config: config_lib.OptimizerConfig) -> optax.GradientTransformation:
    """Calls the optimizer's function: one of `NAMED`, or the user's own."""
    name, arguments = config.name, {"config": config, **config.arguments}
    if ":" not in name:
        return resolving.call(NAMED[name], name, arguments, "optimizer.arguments")
    transformation = resolving.call(resolving.resolve(name, "optimizer.name"), name, arguments, "optimizer.arguments")
    # Not isinstance: a transformation is any pair of functions with these names.
    config_lib.check(
        callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None)),
        "optimizer.name",
        f"{resolving.shown(name)} returned {transformation!r}, not an optax.GradientTransformation",
    )

    def init(params: PyTree) -> PyTree:
        with resolving.named(name, "optimizer.name", "init"):
            return transformation.init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        with resolving.named(name, "optimizer.name", "update"):
            return transformation.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _adam(config: config_lib.OptimizerConfig) -> optax.GradientTransformation:
    """Adam (Kingma and Ba, arXiv 1412.6980)."""
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)


def _sgd(
    config: config_lib.OptimizerConfig, momentum: float = 0.0, nesterov: bool = False
) -> optax.GradientTransformation:
    """Gradient descent, with momentum if `momentum` is above 0."""
    del config  # it has no setting for sgd
    return optax.trace(decay=momentum, nesterov=nesterov) if momentum else optax.identity()


def _adafactor(
    config: config_lib.OptimizerConfig,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    clipping_threshold: float | None = 1.0,
    multiply_by_parameter_scale: bool = True,
    momentum: float | None = None,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern, arXiv 1804.04235). The arguments are those of `optax.adafactor`.

    Clipping and parameter scale take the stacked layers of one projection as one block.
    """
    del config  # it has no setting for adafactor
    descent = optax.adafactor(
        None,
        min_dim_size_to_factor=min_dim_size_to_factor,
        decay_rate=decay_rate,
        clipping_threshold=clipping_threshold,
        multiply_by_parameter_scale=multiply_by_parameter_scale,
        momentum=momentum,
    )
    return optax.chain(descent, optax.scale(-1.0))  # optax's own updates are added


def _muon(
    config: config_lib.OptimizerConfig, momentum: float = 0.95, ns_steps: int = 5, consistent_rms: float | None = 0.2
) -> optax.GradientTransformation:
    """Muon for the layers' matrices, and Adam with Nesterov momentum for tables, norms and biases.

    With `consistent_rms` an update has the size of an AdamW update, so that both parts share one learning rate (Liu et
    al., arXiv 2502.16982).

    Args:
      config: settings of the optimizer; `beta1` and `beta2` are Adam's.
      momentum: decay of the first moment of matrices.
      ns_steps: Newton-Schulz iterations.
      consistent_rms: root mean square of an update of a matrix; None scales it by sqrt(max(1, out / in)).
    """
    descent = optax.contrib.muon(
        1.0,
        ns_steps=ns_steps,
        beta=momentum,
        eps=config.eps,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=consistent_rms,
    )
    return optax.chain(descent, optax.scale(-1.0))  # optax's own updates are added


def matrices(params: PyTree) -> PyTree:
    """Returns input and output axes of the layers' matrices in their stacks, and None for all other parameters."""

    def axes(path: tuple[Any, ...], _: Any) -> optax.contrib.MuonDimensionNumbers | None:
        names = [str(getattr(key, "key", key)) for key in path]
        outside = names[0] in TABLES or names[-1] == "bias" or any(name.endswith("norm") for name in names)
        return None if outside else optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)

    return jax.tree_util.tree_map_with_path(axes, params)


def _lion(config: config_lib.OptimizerConfig) -> optax.GradientTransformation:
    """Lion (Chen et al., arXiv 2302.06675): the sign of a moment. Its usual rate is 3 to 10 times below AdamW's."""
    return optax.scale_by_lion(b1=config.beta1, b2=config.beta2)


NAMED = {"adamw": _adam, "adam": _adam, "sgd": _sgd, "adafactor": _adafactor, "muon": _muon, "lion": _lion}
"""Functions of the optimizers that `optimizer.name` can name."""
