"""Compiles a run's training programs for devices on paper, and counts what they do (`planning.compiled.programs`).

The programs are those of the run: `learner.Learner` makes them as the trainer does.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.models import feasibility
from libra_jax.models.adapters import adapters
from libra_jax.models.attention import attention
from libra_jax.models.experts import expert_groups, expert_tiles
from libra_jax.planning.compiled import compiled, programs
from libra_jax.training import learner, step, topology
from libra_jax.training import state as state_lib

ALL = (step.POLICY, step.APPLY, step.SCORE)
"""Names of the programs that are compiled: a micro-batch's gradient, the update, and scoring."""


def case(
    config: config_lib.RunConfig,
    model: model_config.TransformerConfig,
    devices: Sequence[jax.Device],
    target: str,
    names: Iterable[str] = ALL,
    dump: dict[str, str] | None = None,
) -> programs.CompiledCase:
    """Compiles the programs of a run's longest rows with the most sequences, and counts what they do.

    Args:
      devices: devices to compile for, on paper or real; the mesh takes the first of them.
      target: name of the devices' hardware sheet.
      names: programs to compile.
      dump: takes the text of each program; None drops it.

    Raises:
      ConfigError: too few devices, or the model is not divisible over the mesh.
    """
    # The devices may be of another platform than the one that the run trains on, and `make_mesh` would refuse them.
    trainer = dataclasses.replace(config.trainer, platform="auto")
    run_learner = learner.Learner(dataclasses.replace(config, trainer=trainer), model, devices)
    row_tokens, max_sequences = run_learner.inputs.row_shapes()[-1]
    # Experts take the tokens of all devices of `fsdp`, and each device has a part of the experts.
    tokens = trainer.micro_batch_rows // trainer.data * row_tokens // trainer.context
    expert_tokens = tokens * model.experts_per_token / trainer.fsdp
    iterations = 0.0
    if expert_tokens:
        on, columns = attention.target(devices[0]), model.expert_intermediate_size // trainer.tensor
        if feasibility.choose_experts(on, model.hidden_size, columns, config.model.compute_dtype) == "groups":
            iterations = expert_groups.balanced_iterations(expert_tokens, trainer.fsdp == 1)
        else:
            iterations = expert_tiles.balanced_iterations(expert_tokens, model.num_experts // trainer.fsdp)
    sizes = compiled.Sizes(
        mesh=dict(run_learner.layout.mesh.shape),
        vocabulary=model.vocab_size,
        hidden=model.hidden_size,
        # Of one device: rows are split over data and fsdp, their tokens over context.
        tokens=trainer.micro_batch_rows // (trainer.data * trainer.fsdp) * row_tokens // trainer.context,
        logits_chunk=config.model.logits_chunk,
        expert_iterations=iterations,
    )
    case_programs: dict[str, programs.Program] = {}
    with topology.answering_for(devices[0]):
        for name in names:
            start = time.monotonic()
            batch = None if name == step.APPLY else run_learner.inputs.empty(name, row_tokens, max_sequences)
            program = run_learner.programs.program(name, batch)
            seconds = time.monotonic() - start
            text = program.as_text() or ""
            if dump is not None:
                dump[name] = text
            memory = program.memory_analysis()
            # Results that reuse no argument's buffer.
            fresh = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
            case_programs[name] = programs.Program.counted(
                compiled.count(text, sizes), memory.argument_size_in_bytes, memory.temp_size_in_bytes + fresh, seconds
            )
    return programs.CompiledCase(
        model=Path(config.model.path).name if Path(config.model.path or "?").exists() else config.model.preset,
        parameters=model_config.parameter_count(model),
        target=target,
        data=trainer.data,
        fsdp=trainer.fsdp,
        tensor=trainer.tensor,
        rows=trainer.micro_batch_rows,
        row_tokens=row_tokens,
        packed=trainer.pack,
        remat=config.model.remat,
        state_bytes=_bytes(run_learner.layout.state),
        parameter_bytes=_bytes(run_learner.layout.state.params),
        programs=case_programs,
        reference=run_learner.layout.state.reference is not None,
        context=trainer.context,
        adapter_parameters=adapters.parameter_count(model),
    )


def _bytes(structure: Any) -> float:
    """Returns the bytes of a tree of placed shapes in one device's own memory."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(structure)
            if leaf.sharding.memory_kind != state_lib.HOST
        )
    )
