"""Trains with a tool of a public MCP server: `convert_time` of the package mcp-server-time.

The 0.41 M-parameter character model reads a time and a zone, calls the server's tool, and answers with the time in that
zone. A short supervised warm start teaches it how calls are written. The few steps show that everything works together.
More steps of both kinds (`--config.steps`, `--config.warm_start.steps`) teach the model the task.

Expected: 1.5 minutes on 2 cores; about nine in ten calls succeed right after the warm start (`agent/tool_success` in
metrics.jsonl, turn by turn in trace.jsonl).

  python launch/train.py --config=configs/mcp_cpu.py
"""

from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.name = "mcp"
    config.steps = 4

    config.task.source = "libra_jax.examples.time_zones:task_source"
    config.task.environment = "libra_jax.examples.time_zones:environment"
    config.task.max_turns = 3

    # The same form as in Claude's and VS Code's files, which tools.mcp_file names: a command, or the url of a running
    # server.
    config.tools.mcp = {"mcpServers": {"time": {"command": "mcp-server-time", "args": ["--local-timezone=UTC"]}}}
    config.tools.arguments = {"time": {"only": ["convert_time"]}}
    config.tools.use = ("time",)
    config.tools.describe = False  # the character model learns the tool in the warm start

    config.model.attention_chunk = 128
    config.rollout.slots = 32
    config.rollout.max_context = 768  # the server's answer alone is 340 characters
    config.rollout.max_tokens = 160

    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 4  # Adam's first steps have full size, and right answers are still rare
    config.trainer.platform = "cpu"
    config.trainer.row_tokens = 768
    config.trainer.rows_per_micro_batch = 8

    config.warm_start.steps = 100
    config.warm_start.batch_size = 16
    config.warm_start.learning_rate = 2e-3

    config.coordinator.groups_per_step = 8
    config.coordinator.group_size = 4
    config.coordinator.max_staleness = 1
    config.evaluation.every = 0
    return config
