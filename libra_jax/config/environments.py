"""Settings of tasks, tools and rewards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.config.checks import check, check_choice, check_finite
from libra_jax.config.group import group
from libra_jax.config.parsing import parse

SHARE_OF_CALLS = 0.95
"""Share of a step's time that its calls may take. The rest is for ending calls that overran it."""


@dataclass
@group("task")
class TaskConfig:
    """The tasks. Factories are named `"package.module:factory"`."""

    source: str = "libra_jax.examples.calculator:task_source"  # factory(path=, seed=, **arguments) -> TaskSource
    environment: str = "libra_jax.examples.calculator:environment"  # factory(**environment_arguments) -> Environment
    path: str = ""  # JSONL, Parquet or CSV file, folder of such files, or Hugging Face id, for sources that read tasks
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments of the source
    environment_arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the environment
    # Order of training tasks: sequential (the source's), or success (tasks whose success rate in past rollouts is near
    # target_success are the likeliest). The latter needs a source that knows its number of tasks, such as a table.
    order: str = "sequential"
    target_success: float = 0.5  # success rate, from 0 to 1, of the likeliest tasks of order=success
    exploration: float = 0.2  # share of tasks, from 0 to 1, that order=success takes in the source's order
    tokenizer: str = "character"  # "character", or a Hugging Face directory or id; empty: model.path
    # Control tokens that prompts, tool returns, demonstrations and clients' messages spell: text (they stay text, so
    # that no text can end a turn), parse (they become control tokens, as vLLM's chat endpoint has them).
    control_tokens: str = "text"
    max_turns: int = 4  # most model outputs of a rollout
    max_tokens: int = 0  # most generated tokens of a rollout, over all its outputs; 0: limited by its context
    max_seconds: float = 0.0  # most seconds of a rollout from its first token, tools and waits included; 0: no limit
    # Handling of a tool's return that leaves no room in rollout.max_context: stop (the rollout ends), cut (the return's
    # middle is cut out until answer_tokens are left).
    context_policy: str = "stop"
    answer_tokens: int = 64  # tokens that context_policy=cut leaves for the next output
    # Use of a rollout that a limit of the run ended: mask (it is left out of the loss, of its group's baseline and of
    # algorithm.filter), zero (it trains with its reward: 0, or that of the reward functions), bootstrap (its tokens
    # train the policy by the critic's values and without its reward: algorithm.advantage=egae).
    cut_off: str = "mask"
    # Limits to which cut_off applies. The default ones depend on hardware, load and tool returns: task.max_seconds and
    # rollout.max_context. The policy can learn to keep the other limits, so such a rollout trains with its reward:
    # outputs (max_turns), tokens of one output (length: rollout.max_tokens) and of the rollout (max_tokens).
    cut_off_limits: tuple[str, ...] = ("max_seconds", "max_context")
    reset_seconds: float = 120.0  # seconds of a reset, snapshot, restore or close; a longer one is a crash
    # Seconds of a step; a longer one is a time-out of the tool in running_tool, or else a crash.
    tool_seconds: float = 10.0
    # Seconds a step waits for a resource that other rollouts hold, such as a sandbox; then a crash.
    wait_seconds: float = 600.0
    environment_retries: int = 2  # fresh rollouts after the environment itself crashed, before the group is replaced
    retry_seconds: float = 1.0  # seconds before the first retry, doubled before each further one

    def __post_init__(self) -> None:
        check(self.max_turns > 0, "task.max_turns", f"must be positive, not {self.max_turns}")
        check(self.max_tokens >= 0, "task.max_tokens", f"must not be negative, not {self.max_tokens}; 0 is no limit")
        check_finite(self.max_seconds, "task.max_seconds")
        check(self.max_seconds >= 0, "task.max_seconds", f"must not be negative, not {self.max_seconds}; 0 is no limit")
        check_choice(self.control_tokens, ("text", "parse"), "task.control_tokens")
        check_choice(self.context_policy, ("stop", "cut"), "task.context_policy")
        check(self.answer_tokens > 0, "task.answer_tokens", f"must be positive, not {self.answer_tokens}")
        check_choice(self.cut_off, ("zero", "mask", "bootstrap"), "task.cut_off")
        for limit in self.cut_off_limits:
            check_choice(limit, protocols.LIMITS, "task.cut_off_limits")
        check_finite(self.reset_seconds, "task.reset_seconds")
        check(self.reset_seconds > 0, "task.reset_seconds", f"must be positive, not {self.reset_seconds}")
        check(self.tool_seconds > 0, "task.tool_seconds", f"must be positive, not {self.tool_seconds}")
        check(self.wait_seconds > 0, "task.wait_seconds", f"must be positive, not {self.wait_seconds}")
        check(self.environment_retries >= 0, "task.environment_retries", "must not be negative")
        check_finite(self.retry_seconds, "task.retry_seconds")
        check(self.retry_seconds >= 0, "task.retry_seconds", f"must not be negative, not {self.retry_seconds}")
        check_choice(self.order, ("sequential", "success"), "task.order")
        for name in ("target_success", "exploration"):
            value, default = getattr(self, name), getattr(TaskConfig, name)
            check(0 <= value <= 1, f"task.{name}", f"must lie in [0, 1], not {value}")
            check(
                self.order == "success" or value == default,
                f"task.{name}",
                f"has no effect with task.order={self.order}; leave it at {default:g}, or set task.order=success",
            )
        for name in ("source", "environment"):
            check(":" in getattr(self, name), f"task.{name}", 'must have the form "package.module:factory"')

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


_LEAST_OF_SANDBOX = {"memory_mib": 64, "processes": 2, "files": 100, "input_bytes": 1024, "output_bytes": 256}
"""Below these not even an empty call works: Python itself takes 40 MiB of addresses, and a shell starts a process."""


@dataclass
@group("sandbox")
class SandboxLimits:
    """Limits of one sandbox. A call that exceeds one fails, and says which limit it met.

    Attributes:
      seconds: wall-clock seconds of a call before it times out. Less than 95% of `task.tool_seconds`: otherwise the
        step's own deadline comes first, and the session loses its files. Calls that share a session run one after
        another, and one that has not begun by the step's deadline times out, too.
      cpu_seconds: CPU seconds of a call, over all its processes.
      memory_mib: MiB of memory of all processes together, and of addresses of each.
      processes: number of processes and threads at once, besides the sandbox's own.
      file_mib: MiB of the largest file.
      workspace_mib: MiB of all files of the workspace; as much again of those in /tmp, and in /dev/shm.
      files: number of files in each of these folders.
      input_bytes: bytes of the longest code, command or text of a call.
      output_bytes: bytes of a call's output that are kept; the middle of a longer output is cut out.
      start_seconds: seconds of a sandbox's start. Also seconds until one is free, for callers that have not waited
        for it beforehand as rollouts do (`task.wait_seconds`).
    """

    seconds: float = 5.0
    cpu_seconds: float = 5.0
    memory_mib: int = 512
    processes: int = 32
    file_mib: int = 64
    workspace_mib: int = 128
    files: int = 20_000
    input_bytes: int = 262_144
    output_bytes: int = 16_384
    start_seconds: float = 20.0

    def of_call(self, seconds: float | None) -> float:
        """Returns the seconds of a call that asks for `seconds`; None asks for the default.

        Raises:
          ConfigError: `seconds` is not positive, or infinite.
        """
        if seconds is None:
            return self.seconds
        check(0 < seconds < math.inf, "sandbox.seconds", f"must be positive and finite, not {seconds}")
        return seconds

    def __post_init__(self) -> None:
        for item in dataclasses.fields(SandboxLimits):
            value, name = getattr(self, item.name), f"sandbox.{item.name}"
            whole = item.type is int
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            check(right, name, f"must be a {'whole ' if whole else ''}number, not {value!r}")
            least = _LEAST_OF_SANDBOX.get(item.name, 0)
            check(math.isfinite(value) and value > 0, name, f"must be positive and finite, not {value}")
            check(value >= least, name, f"must be {least} or more, not {value}: less runs nothing at all")


@dataclass
@group("sandbox")
class SandboxConfig(SandboxLimits):
    """The sandbox of code that a policy wrote, and its limits."""

    # Kind: bubblewrap, container (podman or docker), none (contains nothing, needs allow_unsafe).
    backend: str = "bubblewrap"
    allow_unsafe: bool = False  # permission for the backend "none"
    warm: int = 2  # number of sandboxes kept ready, so that a call need not wait for a start
    most: int = 64  # sandboxes in use at once; further rollouts wait before their calls (task.wait_seconds)
    packages: tuple[str, ...] = ()  # directories of Python modules that code may import, read-only
    image: str = ""  # container image with Python 3.11 and bash, for the backend "container"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.backend, ("bubblewrap", "container", "none"), "sandbox.backend")
        check(0 < self.warm <= self.most, "sandbox.warm", f"must lie in 1..sandbox.most = {self.most}, not {self.warm}")

    def limits(self) -> SandboxLimits:
        """Returns the limits alone."""
        return SandboxLimits(**{item.name: getattr(self, item.name) for item in dataclasses.fields(SandboxLimits)})


@dataclass
@group("tools")
class ToolsConfig:
    """Tools of the policy, in environments that take tools (libra_jax.environments)."""

    # Tools: python, shell, edit, search, calculator, a server of `mcp` or `mcp_file`, or "package.module:factory".
    use: tuple[str, ...] = ()
    # Keyword arguments of a tool's factory, by its name; of an MCP server: seconds, start_seconds, only, prefix.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # MCP servers: {"mcpServers": {"name": {"command": "", "args": [], "env": {}} or {"url": "", "headers": {}}}}
    mcp: Mapping[str, Any] = field(default_factory=dict)
    mcp_file: str = ""  # JSON file with MCP servers in the form of `mcp`, as Claude and VS Code have it
    format: str = "hermes"  # syntax of calls: hermes (JSON, as of Qwen and Hermes), tags (<tool>argument</tool>)
    describe: bool = True  # system message that describes the tools; a model warmed up on them needs none
    most_characters: int = 4096  # most characters of a return; the middle of a longer one is cut out
    parallel: int = 4  # most calls of one output, which run concurrently; further calls fail
    # A tool's exception: failure (the policy reads its type and message), restart (the rollout begins again, as after a
    # crash of its environment).
    exceptions: str = "failure"

    def __post_init__(self) -> None:
        check_choice(self.format, ("hermes", "tags"), "tools.format")
        check(self.most_characters > 0, "tools.most_characters", f"must be positive, not {self.most_characters}")
        check_choice(self.exceptions, ("failure", "restart"), "tools.exceptions")
        check(self.parallel > 0, "tools.parallel", f"must be positive, not {self.parallel}")
        twice = [name for name in self.use if self.use.count(name) > 1]
        check(not twice, "tools.use", f"names {twice[0] if twice else ''!r} twice")


OF_REWARDS = ("mean", "std", "environment", "overlong")
"""Metrics under `reward/`, whose names no reward function may have."""


@dataclass
@group("reward.functions")
class RewardFunctionConfig:
    """One function of a reward. A plain one runs on a thread, an async one on an event loop apart from the run's."""

    factory: str = ""  # "package.module:factory"; factory(**arguments) -> fn(task, what the policy wrote)
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
    actors: int = 1  # number of actors that hold the functions; processes with cluster.backend=ray
    # Calls of one function at once, over all actors; the deadline of a waiting call has not begun.
    concurrency: int = 32
    seconds: float = 60.0  # seconds of a call
    retries: int = 1  # further calls after a failed one, before the rollout's group is replaced
    restarts: int = 10  # restarts of dead or hung actors, over the whole run

    def __post_init__(self) -> None:
        check_finite(self.environment_weight, "reward.environment_weight")
        for name in ("actors", "concurrency"):
            check(getattr(self, name) > 0, f"reward.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("retries", "restarts"):
            check(getattr(self, name) >= 0, f"reward.{name}", f"must not be negative, not {getattr(self, name)}")
        check(0 < self.seconds < math.inf, "reward.seconds", f"must be positive and finite, not {self.seconds}")
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
            check(":" in found[name].factory, f"{where}.factory", 'must have the form "package.module:factory"')
            check_finite(found[name].weight, f"{where}.weight")
        return found
