"""Builds a learner's mesh, the layout of its train state, and its programs, before any of them is compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import optax

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.models.attention import attention
from libra_jax.training import critic as critic_lib
from libra_jax.training import inputs, losses, optimizer, score_norms, step
from libra_jax.training import state as state_lib


class ModelPrograms(NamedTuple):
    """What a learner runs.

    Attributes:
      model: shape of the model, with the adapter that the learner trains.
      inputs: the arrays that the programs take, and which models score a batch.
      layout: shapes and shardings of the state.
      transform: the optimizer.
      programs: the programs, which compile at their first use or before.
    """

    model: model_config.TransformerConfig
    inputs: inputs.Inputs
    layout: state_lib.StateLayout
    transform: optax.GradientTransformation
    programs: step.Programs


def build(
    config: config_lib.RunConfig,
    model: model_config.TransformerConfig,
    devices: Sequence[jax.Device],
    *,
    first_update_only: bool,
    critic: bool,
) -> ModelPrograms:
    """Builds the programs of a learner. See `learner.Learner` for the arguments and errors."""
    model = critic_lib.shape(model) if critic else model
    transform = optimizer.transform(config.optimizer)
    mesh = state_lib.make_mesh(config.trainer, devices)
    teacher = None if critic else inputs.teacher(config, model)
    target = attention.target(mesh.devices.flat[0])
    given = inputs.Inputs(config, model, target, critic, first_update_only, teacher)
    # Before any program is traced: the precision becomes a part of the program.
    losses.keep_float32(mesh.devices.flat[0].platform, config.model.compute_dtype)
    layout = state_lib.layout(
        model,
        mesh,
        transform,
        dtype=config.model.param_dtype,
        # The frozen weights under an adapter are the reference model: it needs no copy.
        reference=config.model.compute_dtype
        if given.refers and (model.adapter is None or teacher is not None)
        else None,
        base=None if model.adapter is None else config.model.compute_dtype,
        accumulation=config.trainer.accumulation_dtype,
        offload=config.optimizer.offload,
        critic=critic,
        teacher=teacher,
    )
    options = transformer.ComputeOptions.from_config(config.model, packed=config.trainer.pack, target=target)
    scorer = losses.TokenScorer(model, options, config.model.logits_chunk)
    referred = teacher or dataclasses.replace(model, adapter=None)
    reference = losses.TokenScorer(referred, options, config.model.logits_chunk)
    policy = functools.partial(
        losses.policy,
        scorer=scorer,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        packed=config.trainer.pack,
    )
    temperature = config.rollout.temperature
    values = critic_lib.Values(model, options)
    loss_functions: dict[str, step.Loss] = {
        step.POLICY: policy,
        step.SUPERVISED: functools.partial(losses.supervised, scorer=scorer),
        step.VALUE: functools.partial(critic_lib.loss, values=values, clip=config.critic.clip),
    }
    programs = step.Programs(
        layout,
        transform,
        losses=loss_functions,
        score=lambda params, batch: reference(params, batch, temperature=temperature)[0],
        proximal=values if critic else lambda params, batch: scorer(params, batch, temperature=temperature)[0],
        norms=score_norms.ScoreNorms(
            scorer,
            temperature,
            adapter=model.adapter is not None,
            shards=config.trainer.data * config.trainer.fsdp,
        ),
        helped=config.elastic.hybrid > 0,
    )
    return ModelPrograms(model, given, layout, transform, programs)
