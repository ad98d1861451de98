"""Settings of tasks, tools and rewards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols
from libra_jax.config.checks import check
from libra_jax.config.fields import check_fields, field
from libra_jax.config.group import group
from libra_jax.config.parsing import parse

SHARE_OF_CALLS = 0.95
"""Share of a step's time that its calls may take. The rest is for ending calls that overran it."""


@dataclass
@group("task")
class TaskConfig:
    """The tasks. Factories are named `"package.module:factory"`."""

    # Factory of tasks, called as factory(path=, seed=, **arguments) -> TaskSource.
    source: str = field("libra_jax.examples.calculator:task_source", own_function=True)
    # Factory of environments, called as factory(**environment_arguments) -> Environment.
    environment: str = field("libra_jax.examples.calculator:environment", own_function=True)
    path: str = ""  # JSONL, Parquet or CSV file, folder of such files, or Hugging Face id, for sources that read tasks
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments of the source
    environment_arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the environment
    # Order of training tasks: sequential (the source's), or success (tasks whose success rate in past rollouts is near
    # target_success are the likeliest). The latter needs a source that knows its number of tasks, such as a table.
    order: str = field("sequential", choices=("sequential", "success"))
    # Success rate, from 0 to 1, of the likeliest tasks of order=success.
    target_success: float = field(0.5, ge=0, le=1, needs=("order", "success"))
    # Share of tasks, from 0 to 1, that order=success takes in the source's order.
    exploration: float = field(0.2, ge=0, le=1, needs=("order", "success"))
    tokenizer: str = "character"  # "character", or a Hugging Face directory or id; empty: model.path
    # Control tokens that prompts, tool returns, demonstrations and clients' messages spell: text (they stay text, so
    # that no text can end a turn), parse (they become control tokens, as vLLM's chat endpoint has them).
    control_tokens: str = field("text", choices=("text", "parse"))
    max_turns: int = field(4, gt=0)  # most model outputs of a rollout
    # Most generated tokens of a rollout, over all its outputs; 0: limited by its context.
    max_tokens: int = field(0, ge=0, hint="0 is no limit")
    # Most seconds of a rollout from its first token, tools and waits included; 0: no limit.
    max_seconds: float = field(0.0, ge=0, hint="0 is no limit")
    # Use of a rollout that a limit of the run ended: mask (it is left out of the loss, of its group's baseline and of
    # algorithm.filter), zero (it trains with its reward: 0, or that of the reward functions), bootstrap (its tokens
    # train the policy by the critic's values and without its reward: algorithm.advantage=egae).
    cut_off: str = field("mask", choices=("zero", "mask", "bootstrap"))
    # Limits to which cut_off applies. The default ones depend on hardware, load and tool returns: task.max_seconds and
    # rollout.max_context. The policy can learn to keep the other limits, so such a rollout trains with its reward:
    # outputs (max_turns), tokens of one output (length: rollout.max_tokens) and of the rollout (max_tokens).
    cut_off_limits: tuple[str, ...] = field(("max_seconds", "max_context"), choices=protocols.LIMITS)
    reset_seconds: float = field(120.0, gt=0)  # seconds of a reset, snapshot, restore or close; a longer one is a crash
    # Seconds of a step; a longer one is a time-out of the tool in running_tool, or else a crash.
    tool_seconds: float = field(10.0, gt=0)
    # Seconds a step waits for a resource that other rollouts hold, such as a sandbox; then a crash.
    wait_seconds: float = field(600.0, gt=0)
    # Fresh rollouts after the environment itself crashed, before the group is replaced.
    environment_retries: int = field(2, ge=0)
    retry_seconds: float = field(1.0, ge=0)  # seconds before the first retry, doubled before each further one

    def masks(self, finish: str | None) -> bool:
        """Tells whether a rollout that ended by `finish`, one of `protocols.FINISHES`, is left out of the loss."""
        return self.cut_off == "mask" and finish in self.cut_off_limits

    def cuts(self, finish: str | None) -> bool:
        """Tells whether a limit ended the rollout so that its reward does not count, trained or not."""
        return self.cut_off != "zero" and finish in self.cut_off_limits

    @property
    def call_seconds(self) -> float:
        """Seconds that an environment may give the calls of a step, so that their results still arrive in time."""
        return SHARE_OF_CALLS * self.tool_seconds


@dataclass
@group("sandbox")
class SandboxLimits:
    """Limits of one sandbox. A call that exceeds one fails, and says which limit it met.

    Below the minimum of a limit not even an empty call works: Python itself takes 40 MiB of addresses, and a shell
    starts a process.
    """

    # Wall-clock seconds of a call before it times out. Less than 95% of `task.tool_seconds`: otherwise the step's own
    # deadline comes first, and the session loses its files. Calls that share a session run one after another, and one
    # that has not begun by the step's deadline times out, too.
    seconds: float = field(5.0, gt=0)
    cpu_seconds: float = field(5.0, gt=0)  # CPU seconds of a call, over all its processes
    memory_mib: int = field(512, ge=64)  # MiB of memory of all processes together, and of addresses of each
    processes: int = field(32, ge=2)  # number of processes and threads at once, besides the sandbox's own
    file_mib: int = field(64, gt=0)  # MiB of the largest file
    # MiB of all files of the workspace; as much again of those in /tmp, and in /dev/shm.
    workspace_mib: int = field(128, gt=0)
    files: int = field(20_000, ge=100)  # number of files in each of these folders
    input_bytes: int = field(262_144, ge=1024)  # bytes of the longest code, command or text of a call
    # Bytes of a call's output that are kept; the middle of a longer output is cut out.
    output_bytes: int = field(16_384, ge=256)
    # Seconds of a sandbox's start. Also seconds until one is free, for callers that have not waited for it beforehand
    # as rollouts do (`task.wait_seconds`).
    start_seconds: float = field(20.0, gt=0)

    def of_call(self, seconds: float | None) -> float:
        """Returns the seconds of a call that asks for `seconds`; None asks for the default.

        Raises:
          ConfigError: `seconds` is not positive, or infinite.
        """
        if seconds is None:
            return self.seconds
        check(0 < seconds < math.inf, "sandbox.seconds", f"must be positive and finite, not {seconds}")
        return seconds


@dataclass
@group("sandbox")
class SandboxConfig(SandboxLimits):
    """The sandbox of code that a policy wrote, and its limits."""

    # Kind: bubblewrap, container (podman or docker), none (contains nothing, needs allow_unsafe).
    backend: str = field("bubblewrap", choices=("bubblewrap", "container", "none"))
    allow_unsafe: bool = False  # permission for the backend "none"
    warm: int = field(2, gt=0)  # number of sandboxes kept ready, so that a call need not wait for a start
    most: int = 64  # sandboxes in use at once; further rollouts wait before their calls (task.wait_seconds)
    packages: tuple[str, ...] = ()  # directories of Python modules that code may import, read-only
    image: str = ""  # container image with Python 3.11 and bash, for the backend "container"

    def __post_init__(self) -> None:
        check(self.warm <= self.most, "sandbox.warm", f"must lie in 1..sandbox.most = {self.most}, not {self.warm}")

    def limits(self) -> SandboxLimits:
        """Returns the limits alone."""
        return SandboxLimits(**{item.name: getattr(self, item.name) for item in dataclasses.fields(SandboxLimits)})


@dataclass
@group("tools")
class ToolsConfig:
    """Tools of the policy, in environments that take tools (libra_jax.environments)."""

    # Tools: python, shell, edit, search, calculator, a server of `mcp` or `mcp_file`, or "package.module:factory".
    use: tuple[str, ...] = field((), unique=True)
    # Keyword arguments of a tool's factory, by its name; of an MCP server: seconds, start_seconds, only, prefix.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # MCP servers: {"mcpServers": {"name": {"command": "", "args": [], "env": {}} or {"url": "", "headers": {}}}}
    mcp: Mapping[str, Any] = field(default_factory=dict)
    mcp_file: str = ""  # JSON file with MCP servers in the form of `mcp`, as Claude and VS Code have it
    # Syntax of calls: hermes (JSON, as of Qwen and Hermes), tags (<tool>argument</tool>).
    format: str = field("hermes", choices=("hermes", "tags"))
    describe: bool = True  # system message that describes the tools; a model warmed up on them needs none
    most_characters: int = field(4096, gt=0)  # most characters of a return; the middle of a longer one is cut out
    parallel: int = field(4, gt=0)  # most calls of one output, which run concurrently; further calls fail


OF_REWARDS = ("mean", "std", "environment", "overlong")
"""Metrics under `reward/`, whose names no reward function may have."""


@dataclass
@group(None)
class RewardFunctionConfig:
    """One function of a reward. A plain one runs on a thread, an async one on an event loop apart from the run's."""

    # "package.module:factory"; factory(**arguments) -> fn(task, what the policy wrote)
    factory: str = field("", own_function=True)
    weight: float = 1.0  # factor of its value; 0: only a metric
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the factory


@dataclass
@group("reward")
class RewardConfig:
    """The reward of a rollout: the weighted sum of reward functions and of the environment's own reward."""

    # Reward functions: {"name": {"factory": "package.module:factory", "weight": 1.0, "arguments": {}}}; empty: only the
    # environment's reward.
    functions: Mapping[str, Any] = field(default_factory=dict)
    environment_weight: float = 1.0  # weight of the environment's own reward; 0: only the functions count
    actors: int = field(1, gt=0)  # number of actors that hold the functions; processes with cluster.backend=ray
    # Calls of one function at once, over all actors; the deadline of a waiting call has not begun.
    concurrency: int = field(32, gt=0)
    seconds: float = field(60.0, gt=0)  # seconds of a call
    retries: int = field(1, ge=0)  # further calls after a failed one, before the rollout's group is replaced
    restarts: int = field(10, ge=0)  # restarts of dead or hung actors, over the whole run

    def __post_init__(self) -> None:
        parsed = self.parsed()
        check(
            bool(parsed) or self.environment_weight == 1,
            "reward.environment_weight",
            f"{self.environment_weight:g} weighs the environment's reward against functions, and reward.functions "
            "names none; leave it at 1",
        )
        check(
            self.environment_weight != 0 or any(function.weight for function in parsed.values()) or not parsed,
            "reward.functions",
            "every weight is 0, that of the environment's own reward included: nothing would be rewarded",
        )

    def parsed(self) -> dict[str, RewardFunctionConfig]:
        """Returns the functions by name.

        Raises:
          ConfigError: an entry is not as `RewardFunctionConfig` says, or its name cannot be a metric's.
        """
        found = {}
        for name, values in self.functions.items():
            where = f"reward.functions.{name}"
            right = isinstance(name, str) and name.isidentifier() and name not in OF_REWARDS
            taken = f"; {', '.join(OF_REWARDS)} are taken" if name in OF_REWARDS else ""
            check(right, "reward.functions", f"{name!r} cannot be a function's name: give it a plain word{taken}")
            check(isinstance(values, Mapping), where, f'must be a mapping with "factory" and more, not {values!r}')
            found[name] = parse(RewardFunctionConfig, values, f"{where}.")
            check_fields(found[name], f"{where}.")
        return found
