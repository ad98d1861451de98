"""Makes a loop worker in its process: the agent of the run, as its config names it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax.build import chat_formats
from libra_jax.cluster import inprocess
from libra_jax.harness.gateway import fronts
from libra_jax.rewards import composition
from libra_jax.rollouts import factories, harness_loop, loop_worker, rollouts
from libra_jax.tools import toolkit
from libra_jax.utils import machine, run_context


def create(config: Mapping[str, Any], workdir: str) -> loop_worker.LoopWorkerActor:
    """Makes a loop worker, as the actor's factory. Its `start` makes the agent.

    Args:
      config: a `RunConfig` as plain dicts (`config.to_dict`).
      workdir: directory of the run.

    Raises:
      ConfigError: a field has an unusable value.
    """
    parsed = config_lib.parse(config_lib.RunConfig, config)
    # Reward functions and the gateway live in this process, beside the rollouts that ask for them.
    cluster = inprocess.InProcessCluster(shutdown_seconds=parsed.deadlines.shutdown)
    head = parsed.cluster.address
    address = machine.cluster_address(head) if head else machine.LOOPBACK
    return loop_worker.LoopWorkerActor(parsed, cluster, Path(workdir), open_agent, address)


@contextlib.asynccontextmanager
async def open_agent(run: run_context.RunContext) -> AsyncIterator[rollouts.RolloutAgent]:
    """Opens tools and reward, and yields the agent. It has no teacher: the coordinator asks that.

    Raises:
      LibraError: something of the agent cannot be made.
    """
    config = run.config
    async with (
        toolkit.Toolkit(config.tools, config.sandbox, config.task.call_seconds) as tools,
        composition.open_scorer(
            config.reward, run.cluster, note=run.recorder.note, start_seconds=config.deadlines.reward_start
        ) as reward,
    ):
        tokenizer = chat_formats.policy_tokenizer(config, tools)
        yield rollouts.RolloutAgent(
            make_environment=factories.environment_factory(config.task, tools),
            tokenizer=tokenizer,
            reward=reward,
            host=harness_loop.SessionResources(
                gateway=fronts.Fronts(run, model=config.name),
                make_form=lambda: chat_formats.make(tokenizer, config.gateway),
                strict=config.gateway.strict,
            ),
        )
