"""Trains the quickstart's policy through an agent of its own: a loop around an `openai` client, on two CPU cores.

The task is the quickstart's calculator. But the run does not step an environment: each rollout is a session of the
run's gateway, and the agent asks that for model outputs as it would ask OpenAI. It runs the calculator itself. Prompts,
tool returns and rewards are those of the native environment.

  python launch/train.py --config=configs/any_agent_cpu.py

Two variants show that agents can have processes and dependencies of their own. A process takes seconds of a core to
start, so they have few rollouts and steps:

- `--config=configs/any_agent_cpu.py:process` runs the same loop in a process for each rollout.
- `--config=configs/any_agent_cpu.py:agents_sdk` runs an agent of the OpenAI Agents SDK, which calls the calculator as a
  function tool. First: `bash launch/harness.sh openai_agents`.
"""

from configs import quickstart
from libra_jax import config as config_lib

_LOOP = "libra_jax.harness.openai_loop"


def get_config(variant: str = "loop") -> config_lib.RunConfig:
    config_lib.check_choice(variant, ("loop", "process", "agents_sdk"), "any_agent_cpu")
    config = quickstart.get_config()
    config.name = "any-agent" if variant == "loop" else f"any-agent-{variant}"
    config.task.environment = "libra_jax.harness:environment"
    config.task.environment_arguments = {
        "callable": f"{_LOOP}:agent",
        # The loop scores itself by the task's answer. The model runs no commands, so it cannot read the answer.
        "fields": ("*",),
        # Their calls are a part of the text, so the tool's name is not on the wire.
        "status": f"{_LOOP}:status",
        "demonstrate": f"{_LOOP}:demonstration",
        "most": 1024,  # coroutines of this process: all rollouts of a step at once
    }
    if variant == "process":
        config.task.environment_arguments = {**config.task.environment_arguments, "python": "python", "most": 2}
    if variant == "agents_sdk":
        config.task.environment_arguments = {
            "callable": "libra_jax.examples.outside.agents_sdk:solve",
            "fields": ("expression", "max_characters"),
            "score": "libra_jax.examples.outside.agents_sdk:score",
            "python": ".venv/harness-openai_agents/bin/python",
            "demonstrate": "libra_jax.examples.outside.agents_sdk:demonstration",
            "most": 2,
        }
        config.gateway.tool_parser = "hermes"  # as the demonstrations write calls
        config.rollout.max_tokens, config.rollout.max_context = 96, 192
        config.warm_start.steps = 300  # a call is four times as long as the quickstart's
    if variant != "loop":
        config.steps = 4
        config.task.wait_seconds = 3600.0  # for one of the two places
        config.task.tool_seconds = 60.0
        config.coordinator.groups_per_step, config.coordinator.group_size = 4, 4
        config.evaluation.every = 0
    return config
