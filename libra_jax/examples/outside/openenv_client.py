"""An agent that plays an OpenEnv environment through OpenEnv's own client.

Runs under an interpreter that has `openenv-core` (a hundred packages), such as that of the virtual environment which
`bash launch/harness.sh openenv` makes. `libra_jax.environments.openenv` speaks the same protocol without them.

    config.task.source = "libra_jax.environments.episodes:task_source"
    config.task.environment = "libra_jax.harness:environment"
    config.task.environment_arguments = {
        "callable": "libra_jax.examples.outside.openenv_client:play",
        "fields": ("seed",),
        "python": ".venv/harness-openenv/bin/python",
        "arguments": {"url": "http://localhost:8000", "field": "message", "max_steps": 4},
    }
"""

from __future__ import annotations

import json
from typing import Any


async def play(
    task: Any,
    endpoint: Any,
    url: str,
    field: str = "message",
    observe: str = "",
    max_steps: int = 8,
    system: str = "",
    arguments: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Plays one episode, and returns the sum of its rewards.

    Args:
      task: an episode with a payload `seed`.
      endpoint: address of the session.
      url: address of the environment's server.
      field: field of the action that holds the model's text.
      observe: field of observations that the model sees; empty: all fields, as JSON.
      max_steps: steps after which the episode is cut off with its reward so far.
      system: system message; empty: none.
      arguments: further arguments of the server's reset.
    """
    import openai
    from openenv.core import GenericEnvClient

    def observation_text(result: Any) -> str:
        observation = result.observation[observe] if observe else result.observation
        return observation if isinstance(observation, str) else json.dumps(observation)

    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    earned, steps = 0.0, 0
    async with (
        GenericEnvClient(base_url=url) as world,
        openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.secret) as model,
    ):
        result = await world.reset(seed=task.payload["seed"], **(arguments or {}))
        messages.append({"role": "user", "content": observation_text(result)})
        while not result.done and steps < max_steps:
            answer = await model.chat.completions.create(model=endpoint.model, messages=messages)
            text = answer.choices[0].message.content or ""
            result = await world.step({field: text})
            earned, steps = earned + float(result.reward or 0.0), steps + 1
            messages += [{"role": "assistant", "content": text}]
            messages += [{"role": "tool", "tool_call_id": "environment", "content": observation_text(result)}]
    return {"reward": earned, "metrics": {"episode_steps": steps, "episode_cut": not result.done}}
