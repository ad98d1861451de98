"""Questions of time zones, for a public MCP server's tool."""

import asyncio
import os
import shutil
import sys

import loop_doubles
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.examples import time_zones
from libra_jax.rollouts import loop
from libra_jax.tools import toolkit

TOOLS = config_lib.ToolsConfig(
    use=("time",),
    mcp={"mcpServers": {"time": {"command": "mcp-server-time", "args": ["--local-timezone=UTC"]}}},
    arguments={"time": {"only": ["convert_time"]}},
    describe=False,
)


def test_a_demonstration_is_what_the_server_and_the_loop_make_of_its_outputs():
    if not shutil.which("mcp-server-time", path=os.path.dirname(sys.executable)):
        pytest.skip("needs mcp-server-time")
    tasks = [time_zones.task_source(seed=1).task(index) for index in range(4)]

    async def live(task, kit):
        shown = time_zones.environment(kit).demonstration(task)
        outputs = [message.content for message in shown if message.role == "assistant"]
        return await loop.run_rollout(
            loop.RolloutSetup(
                trajectory=protocols.Trajectory("t/0", "t"),
                task=task,
                tokenizer=loop_doubles.TOKENIZER,
                sampler=loop_doubles.ScriptedSampler(outputs),
                limits=loop.Limits(max_turns=3, max_tokens=160, max_context=768, tool_seconds=10.0, temperature=1.0),
            ),
            time_zones.environment(kit),
        )

    async def body():
        async with toolkit.Toolkit(TOOLS, config_lib.SandboxConfig()) as kit:
            return [
                (
                    await live(task, kit),
                    tokenizers.demonstration_trajectory(task, time_zones.environment(kit), loop_doubles.TOKENIZER),
                )
                for task in tasks
            ]

    for trajectory, demonstrated in asyncio.run(body()):
        assert trajectory.reward == 1.0
        assert [(turn.tool, turn.status) for turn in trajectory.turns] == [("convert_time", "success"), (None, None)]
        assert trajectory.token_ids == demonstrated.token_ids
        assert len(trajectory.token_ids) < 768


def test_no_held_out_question_is_trained_on():
    tasks = time_zones.task_source(seed=1)
    keys = [
        {(task.payload["time"], task.payload["zone"]) for task in map(make, range(300))}
        for make in (tasks.task, tasks.evaluation_task)
    ]
    assert not keys[0] & keys[1]
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.path: questions of time zones are generated"):
        time_zones.task_source(path="x")
