"""Environments of the package `verifiers` 0.4 and newer (its API `verifiers.v1`): tasksets with their own scoring.

Runs under an interpreter that has `verifiers`, whose pins conflict with this package's. `bash launch/harness.sh
verifiers` makes a virtual environment. Install the environments there:

    config.task.source = "libra_jax.environments.episodes:task_source"
    config.task.environment = "libra_jax.harness:environment"
    config.task.environment_arguments = {
        "callable": "libra_jax.examples.outside.verifiers_v1:solve",
        "fields": ("seed",),
        "python": ".venv/harness-verifiers/bin/python",
        "arguments": {"taskset": {"id": "gsm8k"}, "tasks": 1000},
    }

Each rollout is one episode of one task. Its reward is the sum of the trace's weighted rewards.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

FRAMEWORK = ("ProviderError", "InterceptionError", "TunnelError", "SandboxError", "HarnessError", "ToolsetError")
"""Errors of verifiers that are infrastructure. Those of a task or an environment's own code are raised, too."""


async def solve(
    task: Any,
    endpoint: Any,
    taskset: dict[str, Any],
    tasks: int,
    environment: dict[str, Any] | None = None,
    agent: dict[str, Any] | None = None,
    uv: bool = False,
) -> dict[str, Any]:
    """Plays one episode, and returns its verdict.

    Args:
      task: an episode with a payload `seed`, which picks the task.
      endpoint: address of the session.
      taskset: verifiers' settings of the taskset, such as {"id": "gsm8k"}.
      tasks: number of the taskset's tasks to use; of an odd number, the last one is left out. Odd ones are held out, as
        odd seeds are.
      environment: further settings of verifiers' environment, such as {"id": "best-of-n"}.
      agent: settings of its agent, such as {"harness": {"id": "null"}, "max_turns": 4}. The runtime is a process
        beside this one unless they name another.
      uv: let verifiers make a virtual environment of its own for the agent's program by uv, which takes the network.
        False: the program runs under this interpreter.
    """
    import verifiers.v1 as vf
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime
    from verifiers.v1.utils import loaders

    if not uv:
        SubprocessRuntime.prepare_uv_script = _own_interpreter
    played = {"runtime": {"type": "subprocess"}, **(agent or {})}
    settings = loaders.resolve_env_config({**(environment or {}), "taskset": taskset, "agent": played})
    env = loaders.load_environment(settings)
    client = vf.EvalClientConfig(base_url=endpoint.url, api_key_var="OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = endpoint.secret
    context = vf.ModelContext(model=endpoint.model, client=client)
    place = place_of(task.payload["seed"], tasks)
    chosen = next(itertools.islice(env.taskset, place, place + 1), None)
    if chosen is None:
        raise ValueError(f"the taskset has no task {place}: set tasks to its number of tasks")
    async with env.serving():
        episode = await env.run_episode(chosen, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        # Nothing that failed is scored: the run starts the rollout afresh.
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason given"
        raise RuntimeError(f"verifiers could not finish the episode: {reasons}")
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    rewards = [trace.reward for trace in trained or episode.traces]
    metrics = {f"verifiers/{_plain(name)}": value for trace in trained for name, value in trace.metrics.items()}
    return {"reward": sum(rewards) / len(rewards), "metrics": metrics}


def place_of(seed: int, tasks: int) -> int:
    """Returns the place of a seed's task among the first `tasks`. It is odd if the seed is odd."""
    # With an odd divisor, seeds that are trained would come to tasks that are held out.
    return seed % max(1, tasks - tasks % 2)


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name)


async def _own_interpreter(
    self: Any, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
) -> list[str]:
    """Stands in for `Runtime.prepare_uv_script`: this interpreter has what verifiers' own programs import."""
    del env, activate
    path = f"program-{abs(hash(script))}.py"
    await self.write(path, script.encode() if isinstance(script, str) else script)
    return [sys.executable, path]
