"""The agent of a loop worker, made from the run's config."""

import asyncio
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax.build import loop_worker
from libra_jax.cluster import inprocess
from libra_jax.rollouts import rollouts
from libra_jax.telemetry import memory
from libra_jax.utils import run_context


def halved(task, text):
    return 0.5


def make(**_):
    return halved


def test_a_loop_worker_scores_by_the_reward_functions_of_the_config():
    function = {"factory": f"{__name__}:make"}
    config = config_lib.parse(config_lib.RunConfig, {"reward": {"functions": {"half": function}}})

    async def body() -> tuple[rollouts.RolloutAgent, bool]:
        cluster = inprocess.InProcessCluster()
        run = run_context.RunContext(config, cluster, memory.MemoryRecorder(), Path("unused"), scope=None)
        async with loop_worker.open_agent(run) as agent:
            scored = agent.reward is not None
        await cluster.shutdown()
        return agent, scored

    agent, scored = asyncio.run(body())
    assert scored
    assert agent.teacher is None
    assert callable(agent.make_environment)
