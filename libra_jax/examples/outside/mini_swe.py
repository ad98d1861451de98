"""mini-swe-agent on a repository: it reads the issue, runs commands, and leaves changed files for hidden tests.

Runs under an interpreter that has `mini-swe-agent`, such as that of the virtual environment which
`bash launch/harness.sh mini_swe_agent` makes:

    config.task.source = "libra_jax.examples.planted:task_source"
    config.task.environment = "libra_jax.harness:environment"
    config.task.environment_arguments = {
        "callable": "libra_jax.examples.outside.mini_swe:solve",
        "python": ".venv/harness-mini_swe_agent/bin/python",
        "files": "files",
        "score": "tests",
    }

The agent's commands run with all rights of the run's user, unless `confine` puts them into bubblewrap.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def solve(
    task: Any,
    endpoint: Any,
    folder: str,
    text: bool = False,
    config: str = "",
    settings: dict[str, Any] | None = None,
    steps: int = 20,
    command_seconds: int = 30,
    confine: bool = False,
) -> dict[str, Any]:
    """Works on a task's issue in the working directory, and reports how the agent ended. A scorer gives the reward.

    Args:
      task: a task with a payload `issue`.
      endpoint: address of the session.
      folder: working directory with the repository.
      text: the model writes commands into its text, instead of calling a tool.
      config: path of a file with prompts and formats. Empty: mini-swe-agent's own.
      settings: further settings, merged over the file's: {"agent": ..., "model": ..., "environment": ...}.
      steps: most outputs of the agent.
      command_seconds: deadline of one command, which the agent sees as a failure.
      confine: run the commands in bubblewrap, by mini-swe-agent's own environment of that name.
    """
    os.environ.update(MSWEA_SILENT_STARTUP="1", MSWEA_COST_TRACKING="ignore_errors", MSWEA_CONFIGURED="true")
    os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", os.path.join(os.environ.get("HOME", folder), "mini"))
    # The gateway answers, or refuses for good: ten attempts would hold the rollout up for minutes after its limit.
    os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")
    # litellm asks the network for its prices unless told to use its own file.
    os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_TELEMETRY="False")
    import yaml
    from minisweagent import config as configs
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments import get_environment
    from minisweagent.models import get_model

    default_config = Path(configs.__file__).parent / ("mini_textbased.yaml" if text else "mini.yaml")
    read = yaml.safe_load(Path(config or default_config).read_text())
    parts = {
        name: {**read.get(name, {}), **(settings or {}).get(name, {})} for name in ("agent", "model", "environment")
    }
    agent_fields = ("system_template", "instance_template", "step_limit", "cost_limit", "max_consecutive_format_errors")
    agent = {name: value for name, value in parts["agent"].items() if name in agent_fields}
    kwargs = {"api_base": endpoint.url, "api_key": endpoint.secret, **parts["model"].get("model_kwargs", {})}
    kind = "litellm_textbased" if text else "litellm"
    model = {"model_class": kind, **parts["model"], "model_name": f"openai/{endpoint.model}", "model_kwargs": kwargs}
    world = {**parts["environment"], "cwd": folder, "timeout": command_seconds}
    world["environment_class"] = "bubblewrap" if confine else "local"
    default_agent = DefaultAgent(
        get_model(config=model), get_environment(world), **{**agent, "step_limit": steps, "cost_limit": 0.0}
    )
    outcome = default_agent.run(task.payload["issue"])
    submitted = outcome.get("exit_status") == "Submitted"
    return {"metrics": {"agent_steps": default_agent.n_calls, "submitted": submitted}}
