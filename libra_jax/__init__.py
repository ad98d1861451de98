"""Libra-JAX: agentic RL post-training of LLMs that keeps every accelerator busy.

    import libra_jax
    from libra_jax import config

    trained = libra_jax.train(config.RunConfig(), environment=MyEnvironment, reward=my_reward, tasks=my_tasks)

The functions import what they need when they are called: vLLM's processes import this package, too, and must not load
JAX.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libra_jax import config as libra_config
    from libra_jax.planning import search
    from libra_jax.runs import api, objects, records
    from libra_jax.simulator import comparison, settings

# No HTTP client asks a proxy for this machine, here or in a process that starts here. Clients read either name.
for _name, _other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
    _hosts = [host for host in os.environ.get(_name, os.environ.get(_other, "")).split(",") if host.strip()]
    if "*" not in _hosts:
        _hosts += [host for host in ("127.0.0.1", "localhost", "::1") if host not in _hosts]
    os.environ[_name] = ",".join(_hosts)

__all__ = ["evaluate", "evaluate_async", "load", "plan", "simulate", "simulate_async", "train", "train_async"]


def train(
    config: libra_config.RunConfig,
    *,
    environment: objects.MakeEnvironment | None = None,
    reward: objects.RewardFunction | None = None,
    tasks: objects.Tasks | None = None,
    workdir: str | Path | None = None,
    allow_changes: Sequence[str] = (),
) -> api.Trained:
    """Trains a policy and returns when the run has ended; in a notebook, the cell shows the reward's curve meanwhile.

    Called again with the same config and objects, a run goes on from its last checkpoint. A script calls this under
    `if __name__ == "__main__":`, because vLLM's processes import the script again.

    Args:
      config: the run's configuration. Objects below replace what its names stand for.
      environment: class or function that makes a fresh environment (`protocols.Environment`). Without it, given tasks
        are questions with an `answer`, scored by exact match.
      reward: function of (task, text) or (task, transcript) that scores a rollout in place of the environment. To add
        to the environment's score, add `transcript.environment_reward`.
      tasks: mappings with a `prompt`, 5% of which are held out, or a `protocols.TaskSource`.
      workdir: the run's directory; None: `runs/<name>-<hash of config>`.
      allow_changes: settings in which the run may go on otherwise than it began, such as "optimizer.learning_rate".

    Returns:
      The workdir, the directory of the trained weights, and rewards by step.

    Raises:
      LibraError: something is wrong with the run; one sentence names the field, file or worker.
    """
    from libra_jax.runs import api

    return api.train(
        config,
        environment=environment,
        reward=reward,
        tasks=tasks,
        workdir=workdir,
        allow_changes=allow_changes,
    )


async def train_async(
    config: libra_config.RunConfig,
    *,
    environment: objects.MakeEnvironment | None = None,
    reward: objects.RewardFunction | None = None,
    tasks: objects.Tasks | None = None,
    workdir: str | Path | None = None,
    allow_changes: Sequence[str] = (),
) -> api.Trained:
    """Trains a policy on the running event loop; otherwise as `train`. A cancelled call ends the run's workers."""
    from libra_jax.runs import api

    return await api.train_async(
        config,
        environment=environment,
        reward=reward,
        tasks=tasks,
        workdir=workdir,
        allow_changes=allow_changes,
    )


def evaluate(
    config: libra_config.RunConfig,
    *,
    model: str | Path | None = None,
    environment: objects.MakeEnvironment | None = None,
    reward: objects.RewardFunction | None = None,
    tasks: objects.Tasks | None = None,
) -> api.Evaluated:
    """Scores a model on tasks and returns when all are scored. Trains and saves nothing.

    Each task gets `evaluation.attempts` rollouts. The engines, the tools and the limits are those of the config;
    `evaluation.temperature` is 0 unless it is set. A script calls this under `if __name__ == "__main__":`.

    Args:
      config: the run's configuration. Objects below replace what its names stand for.
      model: what to score: a Hugging Face id, a directory of weights such as `Trained.model`, or the workdir of a run
        of this config, whose newest checkpoint counts. None: the config's model.
      environment: as in `train`.
      reward: as in `train`.
      tasks: mappings with a `prompt`, all of which are scored, or a `protocols.TaskSource`, whose first
        `evaluation.tasks` held-out tasks are. None: those of `task.source`.

    Returns:
      The mean reward, each rollout with its reward and text, and means of further metrics.

    Raises:
      LibraError: the model or the tasks cannot be used, a worker is lost, or no task could be scored.
    """
    from libra_jax.runs import api

    return api.evaluate(config, model=model, environment=environment, reward=reward, tasks=tasks)


async def evaluate_async(
    config: libra_config.RunConfig,
    *,
    model: str | Path | None = None,
    environment: objects.MakeEnvironment | None = None,
    reward: objects.RewardFunction | None = None,
    tasks: objects.Tasks | None = None,
) -> api.Evaluated:
    """Scores a model on the running event loop; otherwise as `evaluate`. A cancelled call ends the workers."""
    from libra_jax.runs import api

    return await api.evaluate_async(config, model=model, environment=environment, reward=reward, tasks=tasks)


def load(workdir: str | Path) -> records.Loaded:
    """Reads the records of a run, which may still be going on, to look at or to draw.

    >>> run = libra_jax.load("runs/mine")                                # doctest: +SKIP
    >>> run.metrics.to_pandas().plot("step", "reward/mean")              # doctest: +SKIP
    >>> print(run.config.optimizer.learning_rate, run.samples[0].text()) # doctest: +SKIP

    Args:
      workdir: the run's folder, such as `Trained.workdir`.

    Returns:
      The run's config, its metrics as a table with a row for each step, and the rollouts that it kept as text.

    Raises:
      DataError: the folder holds no config of a run that this version can read.
    """
    from libra_jax.runs import records

    return records.load(workdir)


def simulate(
    config: settings.SimulatedRun, *, policies: Sequence[str] = ("cmlfq",), seeds: Sequence[int] = (0,), jobs: int = 1
) -> comparison.Comparison:
    """Simulates a cluster in virtual time under one scheduling policy or several.

    Args:
      config: the simulated run, such as `configs.simulate.get_config()` returns.
      policies: names of scheduling policies.
      seeds: one simulated run each, of every policy.
      jobs: runs simulated at a time, a process each.

    Returns:
      Step times, throughput and shares by policy and seed, and a bound that no policy can beat.

    Raises:
      ConfigError: a setting is out of range, or nothing can be compared.
    """
    from libra_jax.runs import api

    return api.simulate(config, policies=policies, seeds=seeds, jobs=jobs)


async def simulate_async(
    config: settings.SimulatedRun, *, policies: Sequence[str] = ("cmlfq",), seeds: Sequence[int] = (0,), jobs: int = 1
) -> comparison.Comparison:
    """Simulates while the caller's event loop goes on; otherwise as `simulate`. A cancelled call is not interrupted."""
    import asyncio

    from libra_jax.runs import api

    return await asyncio.to_thread(api.simulate, config, policies=policies, seeds=seeds, jobs=jobs)


def plan(
    *,
    hardware: str,
    model: str,
    accelerators: int,
    workload: str | None = None,
    generated_tokens: float | tuple[float, float] | None = None,
    turns: int | None = None,
    payload_tokens: int | None = None,
    prompt_tokens: int | None = None,
    config: libra_config.RunConfig | None = None,
) -> search.Split:
    """Plans how many accelerators train and how many roll out, and in which layouts.

    Args:
      hardware: name of an accelerator's sheet, such as "h100".
      model: name of a preset, such as "Qwen3-8B".
      accelerators: number to split.
      workload: "swe", "search" or "math".
      generated_tokens: mean of a rollout, or its mean and P90; None: as the workload has.
      turns: model outputs of a rollout.
      payload_tokens: tokens that a tool returns.
      prompt_tokens: tokens of a prompt.
      config: batches and limits; None: 32 prompts of 16 rollouts a step, one version ahead, contexts of any length.

    Returns:
      The split with the shortest training step: its mesh, its rollout instances by degree, and predicted seconds.

    Raises:
      ConfigError: there is no such hardware, model or workload, or nothing fits.
    """
    from libra_jax.runs import api

    return api.plan(
        hardware=hardware,
        model=model,
        accelerators=accelerators,
        workload=workload,
        generated_tokens=generated_tokens,
        turns=turns,
        payload_tokens=payload_tokens,
        prompt_tokens=prompt_tokens,
        config=config,
    )
