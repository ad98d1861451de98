"""Trains the quickstart's policy through an agent of its own: a loop around an `openai` client, on two CPU cores.

The task is the quickstart's calculator. But the run does not step an environment: each rollout is a session of the
run's gateway, and the agent asks that for model outputs as it would ask OpenAI. It runs the calculator itself. Prompts,
tool returns and rewards are those of the native environment.

  python launch/train.py --config=configs/any_agent_cpu.py

`--config=configs/any_agent_cpu.py:process` runs each agent in a process of its own, as one with its own dependencies
needs it. A process takes half a second of a core to start, so this variant has fewer rollouts.
"""

from configs import quickstart
from libra_jax import config as libra_config

_LOOP = "libra_jax.agents.environments.harness.openai_loop"


def get_config(variant: str = "loop") -> libra_config.RunConfig:
    libra_config.check_choice(variant, ("loop", "process"), "any_agent_cpu")
    config = quickstart.get_config()
    config.name = "any-agent" if variant == "loop" else f"any-agent-{variant}"
    config.task.environment = "libra_jax.agents.environments.harness:environment"
    config.task.environment_arguments = {
        "callable": f"{_LOOP}:agent",
        # Their calls are a part of the text, so the tool's name is not on the wire.
        "status": f"{_LOOP}:status",
        "demonstrate": f"{_LOOP}:demonstration",
        "most": 1024,  # coroutines of this process: all rollouts of a step at once
    }
    if variant == "process":
        config.task.environment_arguments = {
            **config.task.environment_arguments,
            "python": "python",
            "most": 2,
        }
        config.steps = 4
        config.task.reset_seconds = 600.0  # an agent that waits for one of the two places asks for nothing
        config.task.tool_seconds = 60.0
        config.coordinator.groups_per_step, config.coordinator.group_size = 4, 4
        config.evaluation.every = 0
    return config
