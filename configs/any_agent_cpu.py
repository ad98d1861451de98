"""Trains the quickstart's policy through an agent of its own: a loop around an `openai` client, on two CPU cores.

The task is the quickstart's calculator. But the run does not step an environment: each rollout is a session of the run's
gateway, and the agent asks that for model outputs as it would ask OpenAI. It runs the calculator itself. Prompts, tool
returns and rewards are those of the native environment, so the reward is that of the quickstart.

  python launch/train.py --config=configs/any_agent_cpu.py

Variants, each a further way of the same agent (`--config=configs/any_agent_cpu.py:VARIANT`):

- `process`: the agent runs in a process of its own, 4 at a time. A Python start for each rollout, so fewer rollouts.
- `agents_sdk`: the agent is one of the OpenAI Agents SDK, in its own virtual environment (`bash launch/harness.sh
  openai_agents`).
"""

from configs import quickstart
from libra_jax import config as libra_config
