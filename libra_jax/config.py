"""Every setting of a run, with its default, unit and meaning: the one place where fields are defined.

Config files (`configs/*.py`) start from `RunConfig()` as an `ml_collections.ConfigDict` and change what they need;
`parse` turns the resolved ConfigDict back into these frozen dataclasses at the boundary. Standard library only, so
that reading a config imports no accelerator library.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import ipaddress
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from libra_jax.protocols import ConfigError


def check(condition: bool, field_name: str, problem: str) -> None:
    """Raises ConfigError naming the field unless `condition` holds."""
    if not condition:
        raise ConfigError(f"config.{field_name}: {problem}")


def check_finite(value: float, field_name: str) -> None:
    """Raises ConfigError unless `value` is a finite number."""
    check(math.isfinite(value), field_name, f"must be a finite number, not {value}")


ALIASES = {"gpu": "cuda", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
"""What others call a choice, for the hint."""


def check_choice(value: str, choices: tuple[str, ...], field_name: str) -> None:
    """Raises ConfigError unless `value` is one of `choices`, offering the nearest."""
    if value not in choices:
        alias = ALIASES.get(value.lower())
        near = [alias] if alias in choices else difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"config.{field_name}: {value!r} is not one of {', '.join(choices)}{hint}")


def check_cores(cores: tuple[int, ...], field_name: str) -> None:
    """Raises ConfigError unless this process may run on each of the CPU cores."""
    here = sorted(os.sched_getaffinity(0))
    for core in cores:
        check(core in here, field_name, f"there is no core {core} for this process; it has {', '.join(map(str, here))}")


@dataclass(frozen=True)
class ModelConfig:
    """The policy. Set `path` for pretrained weights, or `preset` for random initial ones."""

    preset: str = "libra-tiny"  # name of a shipped config.json (libra_jax/models/presets), used where path is empty
    path: str = ""  # Hugging Face model directory (config.json, *.safetensors, tokenizer files)
    compute_dtype: str = "float32"  # activations and matrix products: float32 or bfloat16
    param_dtype: str = "float32"  # master weights and optimizer moments
    remat: str = "none"  # what the backward pass recomputes: none, dots (keep matmul outputs), full
    attention: str = "auto"  # auto, chunked, splash (TPU), cudnn (GPU)
    attention_chunk: int = 512  # queries and keys a block of the chunked online softmax
    logits_chunk: int = 1024  # tokens whose vocabulary logits exist at once

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "param_dtype"):
            check_choice(getattr(self, name), ("float32", "bfloat16"), f"model.{name}")
        check_choice(self.remat, ("none", "dots", "full"), "model.remat")
        check_choice(self.attention, ("auto", "chunked", "splash", "cudnn"), "model.attention")
        check(self.attention_chunk > 0, "model.attention_chunk", f"must be positive, not {self.attention_chunk}")
        check(self.logits_chunk > 0, "model.logits_chunk", f"must be positive, not {self.logits_chunk}")


_SHARE_OF_CALLS = 0.95
"""Of a step's time: the rest is for ending those calls that overran it."""


@dataclass(frozen=True)
class TaskConfig:
    """What the agent is asked to do. Factories are named `"package.module:factory"`."""

    source: str = "libra_jax.agents.calculator:task_source"  # factory(path=, seed=, **arguments) -> TaskSource
    environment: str = "libra_jax.agents.calculator:environment"  # factory(**environment_arguments) -> Environment
    path: str = ""  # JSONL or Parquet file, for the sources that read one
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments of the source
    environment_arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = "character"  # "character", or a Hugging Face directory; empty: model.path
    max_turns: int = 4  # model outputs an attempt may have
    max_tokens: int = 0  # generated tokens an attempt may have, over all its outputs; 0: as many as its context holds
    max_seconds: float = 0.0  # of an attempt from its first token on, tools and waits included; 0: no limit
    # What happens when a tool's return leaves no room in rollout.max_context: stop (the attempt ends), cut (so much of
    # the return's middle is cut out that answer_tokens are left).
    context_policy: str = "stop"
    answer_tokens: int = 64  # room for the next output that context_policy=cut leaves
    reset_seconds: float = 120.0  # deadline of a reset, snapshot or restore: past it, a crash; and of a close
    tool_seconds: float = 10.0  # deadline of a step: past it, the tool named by running_tool timed out, else a crash
    wait_seconds: float = 600.0  # before a step, for what other attempts hold: a sandbox, say; past it, it is a crash
    environment_retries: int = 2  # fresh attempts after the environment itself crashed, before the group is replaced
    retry_seconds: float = 1.0  # before the first of them; twice as long before each further one

    def __post_init__(self) -> None:
        check(self.max_turns > 0, "task.max_turns", f"must be positive, not {self.max_turns}")
        check(self.max_tokens >= 0, "task.max_tokens", f"must not be negative, not {self.max_tokens}; 0 is no limit")
        check_finite(self.max_seconds, "task.max_seconds")
        check(self.max_seconds >= 0, "task.max_seconds", f"must not be negative, not {self.max_seconds}; 0 is no limit")
        check_choice(self.context_policy, ("stop", "cut"), "task.context_policy")
        check(self.answer_tokens > 0, "task.answer_tokens", f"must be positive, not {self.answer_tokens}")
        check_finite(self.reset_seconds, "task.reset_seconds")
        check(self.reset_seconds > 0, "task.reset_seconds", f"must be positive, not {self.reset_seconds}")
        check(self.tool_seconds > 0, "task.tool_seconds", f"must be positive, not {self.tool_seconds}")
        check(self.wait_seconds > 0, "task.wait_seconds", f"must be positive, not {self.wait_seconds}")
        check(self.environment_retries >= 0, "task.environment_retries", "must not be negative")
        check_finite(self.retry_seconds, "task.retry_seconds")
        check(self.retry_seconds >= 0, "task.retry_seconds", f"must not be negative, not {self.retry_seconds}")
        for name in ("source", "environment"):
            check(":" in getattr(self, name), f"task.{name}", 'must have the form "package.module:factory"')

    @property
    def call_seconds(self) -> float:
        """What an environment may give a step's calls, so that it still tells in time what came of them."""
        return _SHARE_OF_CALLS * self.tool_seconds


_LEAST_OF_SANDBOX = {"memory_mib": 64, "processes": 2, "files": 100, "input_bytes": 1024, "output_bytes": 256}
"""Below these not even an empty call works: Python itself takes 40 MiB of addresses, and a shell starts a process."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one sandbox may use. A call that uses more fails, and says which limit it met.

    Attributes:
      seconds: of a call, by the clock on the wall: past them it is a time-out. Less than 95% of `task.tool_seconds`, or
        the step's own deadline comes first, and costs the session its files. So it does to one of several calls that
        share the session: they run one after another, and one that has not begun by then is a time-out, too.
      cpu_seconds: of a call, over all its processes.
      memory_mib: MiB of memory of all processes together, and of addresses of each.
      processes: processes and threads at once, besides the sandbox's own.
      file_mib: MiB of the largest file.
      workspace_mib: MiB of all files of the workspace; as much again of those in /tmp, and in /dev/shm.
      files: how many files each of these may hold.
      input_bytes: longest code, command or text of a call.
      output_bytes: most output of a call that is kept; what is more is cut out of its middle.
      start_seconds: how long a sandbox may take to start, and to become free for who does not wait for its turn
        beforehand, as attempts do (`task.wait_seconds`).
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
        """The seconds of a call that asks for so many; None asks for the usual.

        Raises:
          ConfigError: it asks for none, or for no end of them.
        """
        if seconds is None:
            return self.seconds
        check(0 < seconds < math.inf, "sandbox.seconds", f"must be positive and finite, not {seconds}")
        return seconds

    def __post_init__(self) -> None:
        for item in dataclasses.fields(SandboxLimits):
            value, name = getattr(self, item.name), f"sandbox.{item.name}"
            whole = item.type == "int"
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            check(right, name, f"must be a {'whole ' if whole else ''}number, not {value!r}")
            least = _LEAST_OF_SANDBOX.get(item.name, 0)
            check(math.isfinite(value) and value > 0, name, f"must be positive and finite, not {value}")
            check(value >= least, name, f"must be {least} or more, not {value}: less runs nothing at all")


@dataclass(frozen=True)
class SandboxConfig(SandboxLimits):
    """Where code that a policy wrote runs, and what it may use there."""

    backend: str = "bubblewrap"  # bubblewrap, container (podman or docker), none (contains nothing: allow_unsafe)
    allow_unsafe: bool = False  # permits the backend "none"
    warm: int = 2  # sandboxes kept ready, so that a call need not wait for one to start
    most: int = 64  # sandboxes in use at once; attempts beyond them wait before their calls (task.wait_seconds)
    packages: tuple[str, ...] = ()  # directories of Python modules that code may import, read-only
    image: str = ""  # with Python 3.11 and bash, for the backend "container"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.backend, ("bubblewrap", "container", "none"), "sandbox.backend")
        check(0 < self.warm <= self.most, "sandbox.warm", f"must lie in 1..sandbox.most = {self.most}, not {self.warm}")

    def limits(self) -> SandboxLimits:
        """What one sandbox may use, alone."""
        return SandboxLimits(**{item.name: getattr(self, item.name) for item in dataclasses.fields(SandboxLimits)})


@dataclass(frozen=True)
class ToolsConfig:
    """What the policy may call, in environments that take tools (libra_jax.agents.environments)."""

    # Each is python, shell, edit, search, calculator, a server of `servers`, or "package.module:factory".
    use: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of a tool's factory, by its name
    servers: Mapping[str, Any] = field(default_factory=dict)  # MCP servers: {"name": {"command": [...]} or {"url": ""}}
    format: str = "hermes"  # how calls are written: hermes (JSON, as Qwen and Hermes do), tags (<tool>argument</tool>)
    describe: bool = True  # tell the policy of the tools in a system message; a model warmed up on them needs none
    most_characters: int = 4096  # of a return; what is more is cut out of its middle
    parallel: int = 4  # calls of one output that run, side by side; any more are failures

    def __post_init__(self) -> None:
        check_choice(self.format, ("hermes", "tags"), "tools.format")
        check(self.most_characters > 0, "tools.most_characters", f"must be positive, not {self.most_characters}")
        check(self.parallel > 0, "tools.parallel", f"must be positive, not {self.parallel}")
        twice = [name for name in self.use if self.use.count(name) > 1]
        check(not twice, "tools.use", f"names {twice[0] if twice else ''!r} twice")


OF_REWARDS = ("mean", "std", "environment")
"""Metrics under `reward/` that no function may take the name of."""


@dataclass(frozen=True)
class RewardFunctionConfig:
    """One function of a reward. A plain one runs on a thread, an async one on an event loop apart from the run's."""

    factory: str = ""  # "package.module:factory"; factory(**arguments) -> fn(task, text) -> float
    weight: float = 1.0  # what its value is multiplied by; 0: it is a metric alone
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the factory


@dataclass(frozen=True)
class RewardConfig:
    """What an attempt is worth: functions and the environment's own reward, each times its weight, added up."""

    # {"name": {"factory": "package.module:factory", "weight": 1.0, "arguments": {}}}; empty: the environment's reward
    functions: Mapping[str, Any] = field(default_factory=dict)
    environment_weight: float = 1.0  # of the environment's own reward; 0: the functions alone count
    actors: int = 1  # that hold the functions; with cluster.backend=ray, processes
    concurrency: int = 32  # calls of one function at once, over all actors; those that wait are not overdue yet
    seconds: float = 60.0  # deadline of a call
    retries: int = 1  # further calls after one that failed, before the attempt's group is replaced
    restarts: int = 10  # times that an actor which died or hangs is made anew
    cache_entries: int = 10_000  # values kept, by what a function was given; 0 is off

    def __post_init__(self) -> None:
        check_finite(self.environment_weight, "reward.environment_weight")
        for name in ("actors", "concurrency"):
            check(getattr(self, name) > 0, f"reward.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("retries", "restarts", "cache_entries"):
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
        """The functions by name.

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


@dataclass(frozen=True)
class RolloutConfig:
    """The engines, and how tokens are drawn."""

    engine: str = "vllm"  # vllm; fake is the test double
    tensor_parallel: tuple[int, ...] = (1,)  # one instance an entry: devices that share its weights
    slots: int = 64  # requests an instance decodes at once (vLLM's max_num_seqs)
    slots_by_instance: tuple[int, ...] = ()  # the same, one entry an instance of tensor_parallel; empty: slots for all
    max_context: int = 512  # longest context, in tokens (prompt, tools and generated)
    max_tokens: int = 96  # generated tokens a turn
    temperature: float = 1.0  # sampling temperature; the trainer scores with the same
    top_p: float = 1.0  # refused below 1: every loss here is a function of probability ratios (log-prob contract)
    top_k: int = 0  # 0 is off; refused above 0, likewise
    dtype: str = "float32"  # engine weights, and the wire dtype of publication
    kv_cache_gib: float = 0.5  # KV cache of an instance on CPU
    # On CPU: the core of each worker, instance by instance; empty: not pinned. Under Ray, all of an instance keeps to
    # its cores.
    cores: tuple[int, ...] = ()
    gpu_memory_fraction: float = 0.85  # of a device, for the engine (CUDA)
    stream_interval: int = 16  # tokens between two deltas of a request
    enforce_eager: bool = True  # no compiled graphs: starts faster; False on GPU
    # Weight bytes: memfd (any device; to other hosts by a relay on each), ipc (same GPU), nccl (one other GPU group).
    transport: str = "memfd"
    bucket_mib: int = 256  # MiB of a weight bucket
    checksum: bool = False  # digest each bucket on both sides; always done where relays or replicas need it
    kv_transfer: str = "none"  # a request that moves: none (prefills again), nixl (vLLM's connector brings its KV; GPU)
    generation_retries: int = 8  # times a request may be resumed after its engine failed
    restarts: int = 3  # times an engine that died is started again
    health_seconds: float = 10.0  # between two health checks of an instance

    def __post_init__(self) -> None:
        check_choice(self.engine, ("vllm", "fake"), "rollout.engine")
        check(len(self.tensor_parallel) > 0, "rollout.tensor_parallel", "needs at least one instance")
        for degree in self.tensor_parallel:
            check(degree in (1, 2, 4, 8), "rollout.tensor_parallel", f"{degree} is not one of 1, 2, 4, 8")
        for name in ("slots", "max_context", "max_tokens", "stream_interval", "bucket_mib"):
            check(getattr(self, name) > 0, f"rollout.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("generation_retries", "restarts", "top_k"):
            check(getattr(self, name) >= 0, f"rollout.{name}", f"must not be negative, not {getattr(self, name)}")
        given, instances = self.slots_by_instance, len(self.tensor_parallel)
        check(
            len(given) in (0, instances),
            "rollout.slots_by_instance",
            f"has {len(given)} entries for the {instances} instances of tensor_parallel; give one each, or none",
        )
        check(all(slots > 0 for slots in given), "rollout.slots_by_instance", f"must be positive, not {given}")
        check(
            len(self.cores) in (0, sum(self.tensor_parallel)),
            "rollout.cores",
            f"has {len(self.cores)} entries for the {sum(self.tensor_parallel)} workers of tensor_parallel; give one "
            "each, or none",
        )
        check_choice(self.kv_transfer, ("none", "nixl"), "rollout.kv_transfer")
        check(self.health_seconds > 0, "rollout.health_seconds", f"must be positive, not {self.health_seconds}")
        check_finite(self.temperature, "rollout.temperature")
        check(self.temperature > 0, "rollout.temperature", f"must be positive to train on, not {self.temperature}")
        check(0 < self.top_p <= 1, "rollout.top_p", f"must lie in (0, 1], not {self.top_p}")
        fraction = self.gpu_memory_fraction
        check(0 < fraction <= 1, "rollout.gpu_memory_fraction", f"must lie in (0, 1], not {fraction}")
        check(self.kv_cache_gib > 0, "rollout.kv_cache_gib", f"must be positive, not {self.kv_cache_gib}")
        check_choice(self.dtype, ("float32", "bfloat16", "float16"), "rollout.dtype")
        check_choice(self.transport, ("memfd", "ipc", "nccl"), "rollout.transport")
        check(
            self.transport == "memfd" or len(self.tensor_parallel) == 1,
            "rollout.transport",
            f"{self.transport} serves one rollout instance, and tensor_parallel asks for {len(self.tensor_parallel)}; "
            "use memfd",
        )

    @property
    def instance_slots(self) -> tuple[int, ...]:
        """Slots of each instance."""
        return self.slots_by_instance or (self.slots,) * len(self.tensor_parallel)


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
LOSSES = ("clipped", "gspo", "cispo")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
CORRECTIONS = ("none", "truncated", "masked")
KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective. Functions and references: libra_jax/algorithms."""

    advantage: str = "grpo"
    loss: str = "clipped"
    clip_low: float = 0.2  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 0.0  # lower bound factor for negative advantages; 0 is off (else above 1)
    aggregation: str = "token_mean"
    sequence_length_constant: float = 1.0  # divisor of sequence_sum
    objective: str = "behaviour"  # behaviour: ratio to the sampling policy; decoupled: to a recomputed proximal one
    correction: str = "none"  # importance sampling of the proximal over the behaviour policy: none, truncated, masked
    correction_cap: float = 2.0  # truncated: weights above are cut to it; masked: tokens above are dropped
    kl_coefficient: float = 0.0  # above zero a frozen reference model lives on the trainer's mesh
    kl_estimator: str = "k3"  # k1, k2, k3; k1+ and k3+ have the value of k1 and k3 and the gradient of k2
    kl_in_reward: bool = False
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        check_choice(self.advantage, ADVANTAGES, "algorithm.advantage")
        check_choice(self.loss, LOSSES, "algorithm.loss")
        check_choice(self.aggregation, AGGREGATIONS, "algorithm.aggregation")
        check_choice(self.objective, ("behaviour", "decoupled"), "algorithm.objective")
        check_choice(self.correction, CORRECTIONS, "algorithm.correction")
        check_choice(self.kl_estimator, KL_ESTIMATORS, "algorithm.kl_estimator")
        for name in ("kl_coefficient", "entropy_coefficient", "sequence_length_constant"):
            check_finite(getattr(self, name), f"algorithm.{name}")
        check(0 <= self.clip_low <= 1, "algorithm.clip_low", f"must lie in [0, 1], not {self.clip_low}")
        check(self.clip_high >= 0, "algorithm.clip_high", f"must not be negative, not {self.clip_high}")
        check(self.dual_clip == 0 or self.dual_clip > 1, "algorithm.dual_clip", "must be 0 (off) or above 1")
        check(self.correction_cap > 0, "algorithm.correction_cap", "must be positive")
        check(self.kl_coefficient >= 0, "algorithm.kl_coefficient", "must not be negative")
        check(self.sequence_length_constant > 0, "algorithm.sequence_length_constant", "must be positive")


@dataclass(frozen=True)
class OptimizerConfig:
    """optax optimizer and schedule."""

    name: str = "adamw"  # adamw, adam, sgd
    learning_rate: float = 1e-3  # peak
    schedule: str = "constant"  # constant, cosine, linear (the last two decay to 0 at config.steps: see there)
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    clip_norm: float = 1.0  # global gradient norm; 0 is off

    def __post_init__(self) -> None:
        check_choice(self.name, ("adamw", "adam", "sgd"), "optimizer.name")
        check_choice(self.schedule, ("constant", "cosine", "linear"), "optimizer.schedule")
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            check_finite(value, f"optimizer.{name}")
            check(value >= 0, f"optimizer.{name}", f"must not be negative, not {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check(0 <= value < 1, f"optimizer.{name}", f"must lie in [0, 1), not {value}")
        check_finite(self.eps, "optimizer.eps")
        check(self.eps > 0, "optimizer.eps", f"must be positive, not {self.eps}")
        check(self.warmup_steps >= 0, "optimizer.warmup_steps", "must not be negative")
        check_finite(self.clip_norm, "optimizer.clip_norm")
        check(self.clip_norm >= 0, "optimizer.clip_norm", f"must not be negative (0 is off), not {self.clip_norm}")


@dataclass(frozen=True)
class TrainerConfig:
    """The trainer's mesh and the shapes it compiles for."""

    platform: str = "auto"  # auto: what JAX finds (one GPU at most); cpu: virtual devices, as the mesh needs; cuda; tpu
    processes: int = 1  # that the mesh's devices belong to, equally many each; above 1 with cluster.backend=ray
    data: int = 1  # data-parallel replicas
    fsdp: int = 1  # ways parameters and optimizer are sharded
    tensor: int = 1  # ways a layer's matrices are split
    context: int = 1  # reserved
    row_tokens: int = 512  # length of a packed row; a longer trajectory gets a longer row from row_buckets
    row_buckets: tuple[int, ...] = ()  # further row lengths, ascending, all above row_tokens
    rows_per_micro_batch: int = 8  # rows in a micro-batch, over all data and fsdp shards
    pack: bool = True  # several trajectories a row, kept apart by segment ids
    cores: tuple[int, ...] = ()  # CPU cores that the trainer's threads are pinned to; empty: not pinned
    max_skipped_steps: int = 10  # non-finite steps in a row after which the run stops
    # Times that a trainer which is lost is made anew, from the last checkpoint. The groups trained since that stay in
    # memory, to be trained again (about 0.1 kB a token); 0, or checkpoint.every=0: its loss ends the run. So it does
    # where checkpoints have failed for more than 4 times checkpoint.every steps: no more are kept.
    restarts: int = 3

    def __post_init__(self) -> None:
        check_choice(self.platform, ("auto", "cpu", "cuda", "tpu"), "trainer.platform")
        for name in ("processes", "data", "fsdp", "tensor", "context", "row_tokens", "rows_per_micro_batch"):
            check(getattr(self, name) > 0, f"trainer.{name}", f"must be positive, not {getattr(self, name)}")
        check(
            self.devices % self.processes == 0,
            "trainer.processes",
            f"the mesh's {self.devices} devices do not divide over {self.processes} processes",
        )
        check(self.restarts >= 0, "trainer.restarts", f"must not be negative, not {self.restarts}")
        check(self.context == 1, "trainer.context", "is reserved: only 1 is supported")
        lengths = (self.row_tokens, *self.row_buckets)
        check(list(lengths) == sorted(set(lengths)), "trainer.row_buckets", "must ascend and exceed row_tokens")
        for length in lengths:
            name = "row_tokens" if length == self.row_tokens else "row_buckets"
            check(length % self.tensor == 0, f"trainer.{name}", f"{length} does not divide over tensor = {self.tensor}")
        shards = self.data * self.fsdp
        check(
            self.rows_per_micro_batch % shards == 0,
            "trainer.rows_per_micro_batch",
            f"{self.rows_per_micro_batch} does not divide over data x fsdp = {shards} shards",
        )

    @property
    def devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.fsdp * self.tensor * self.context


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on the environment's demonstrations before reinforcement learning begins."""

    steps: int = 0  # at most
    batch_size: int = 64  # demonstrations a step
    learning_rate: float = 3e-3
    target_loss: float = 0.0  # ends it early, at the first step whose mean token loss is no higher; 0 is off

    def __post_init__(self) -> None:
        check(self.steps >= 0, "warm_start.steps", "must not be negative")
        check(self.batch_size > 0, "warm_start.batch_size", "must be positive")
        check_finite(self.learning_rate, "warm_start.learning_rate")
        check(self.learning_rate >= 0, "warm_start.learning_rate", f"must not be negative, not {self.learning_rate}")
        check(self.target_loss >= 0, "warm_start.target_loss", f"must not be negative, not {self.target_loss}")


@dataclass(frozen=True)
class CoordinatorConfig:
    """Batches, staleness and replacement."""

    groups_per_step: int = 32  # prompts a training step
    group_size: int = 8  # attempts a prompt
    staleness: int = 0  # eta: a group trains at most this many versions after its first dispatch; 0 is synchronous
    stale: str = "wait"  # a group about to pass eta: wait (training waits for it) or replace
    filter_zero_variance: bool = False  # replace groups whose rewards are all equal (counted, capped)
    max_replacements: float = 1.0  # replaced groups allowed, as a multiple of the groups trained (plus one step)
    # Groups begun beyond what a step needs, as a share of it, rounded up. The first to finish are trained on, the last
    # are given up whole: training sees fewer long attempts than the policy makes, which biases it. 0 is off.
    redundancy: float = 0.0

    @property
    def spare_groups(self) -> int:
        """Groups that may run beyond what the steps to come can train on."""
        return math.ceil(round(self.redundancy * self.groups_per_step, 6))

    def __post_init__(self) -> None:
        check_finite(self.redundancy, "coordinator.redundancy")
        check(self.redundancy >= 0, "coordinator.redundancy", f"must not be negative, not {self.redundancy}")
        check(self.groups_per_step > 0, "coordinator.groups_per_step", "must be positive")
        check(self.group_size > 0, "coordinator.group_size", "must be positive")
        check(self.staleness >= 0, "coordinator.staleness", "must not be negative")
        check_choice(self.stale, ("wait", "replace"), "coordinator.stale")
        allowed = self.max_replacements  # may be infinite
        check(not math.isnan(allowed), "coordinator.max_replacements", "must be a number, not nan")
        check(allowed >= 0, "coordinator.max_replacements", f"must not be negative, not {allowed}")


POLICIES = (
    "cmlfq",
    "cmlfq_paper",
    "round_robin",
    "least_loaded",
    "sticky",
    "mlfq",
    "length_predictor",
    "heddle",
    "oracle",
)

ORDERINGS = ("auto", "fcfs", "longest_first", "shortest_first", "group_completion")


@dataclass(frozen=True)
class CostConfig:
    """What serving costs over real engines, as the scheduler sees it (libra_jax/scheduling/costs.py).

    The defaults are of the order of a 14-billion-parameter model on 80 GB GPUs. The simulator has its own model.
    """

    step_seconds: float = 0.02  # one decode step of one request with no context, at tensor-parallel degree 1
    request_seconds: float = 1e-4  # what each further request adds to the step
    context_seconds: float = 1e-7  # what each token of context adds to the step
    scaling: float = 0.7  # share of each further device that tensor parallelism turns into speed; 1 is perfect
    prefill_tokens_per_second: float = 6000.0  # at degree 1; a move prefills the context again ...
    transfer_tokens_per_second: float = 50_000.0  # ... or with rollout.kv_transfer brings its KV, whichever is less

    def __post_init__(self) -> None:
        for name in ("step_seconds", "prefill_tokens_per_second", "transfer_tokens_per_second"):
            check(getattr(self, name) > 0, f"scheduler.costs.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("request_seconds", "context_seconds"):
            value = getattr(self, name)
            check(value >= 0, f"scheduler.costs.{name}", f"must not be negative, not {value}")
        check(0 <= self.scaling <= 1, "scheduler.costs.scaling", f"must lie in [0, 1], not {self.scaling}")


@dataclass(frozen=True)
class SchedulerConfig:
    """Which rollout instance serves a request next (libra_jax/scheduling). Tokens are generated ones."""

    policy: str = "cmlfq"
    max_remaining_tokens: tuple[int, ...] = ()  # bounds of the buckets: one a tensor-parallel degree but the largest
    ordering: str = "auto"  # inside a bucket: auto (as the policy was published), fcfs, longest_first, ...
    ageing_seconds: float = 900.0  # who has waited that long goes before all others, to any instance
    window: int = 200  # remaining lengths that a node of a prefix tree keeps
    tree_nodes: int = 50_000  # of a prefix tree; the least recently used go
    path_depth: int = 16  # tool returns of a path that a prefix tree tells apart
    half_life: int = 4096  # finished trajectories after which evidence that was not renewed weighs half
    learnt_from: tuple[str, ...] = ()  # workdirs of other runs: this one starts with what their schedulers had learnt
    prior_count: float = 8.0  # cmlfq: samples at which a node weighs as much as the wider evidence behind it
    move_margin: float = 8.0  # cmlfq: a move costs so many times its seconds, as loads even out before it has paid off
    tail_power: float = 4.0  # cmlfq: costs grow with this power of the time to finish; 1 is mean latency, more the tail
    cache_share: float = 0.9  # cmlfq: share of an instance's KV cache that its requests may come to fill; 0: any
    reserve: float = 0.1  # cmlfq: share of a bucket's slots that overflow from narrower buckets leaves free
    sticky_threshold: float = 0.1  # sticky: excess share of slots in use that makes a request leave its cache
    quanta: tuple[int, ...] = ()  # mlfq: tokens a level but the last serves a request; empty: max_remaining_tokens
    predictor_sigma: float = 0.5  # length_predictor: standard deviation of the log of predicted / true length
    preempt_ratio: float = 2.0  # heddle: a waiting request displaces one predicted this many times shorter
    costs: CostConfig = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        check_choice(self.policy, POLICIES, "scheduler.policy")
        check_choice(self.ordering, ORDERINGS, "scheduler.ordering")
        for name in ("max_remaining_tokens", "quanta"):
            bounds = getattr(self, name)
            check(all(bound > 0 for bound in bounds), f"scheduler.{name}", f"must be positive, not {bounds}")
        bounds = self.max_remaining_tokens
        check(
            list(bounds) == sorted(set(bounds)),
            "scheduler.max_remaining_tokens",
            f"must ascend from the narrowest bucket to the widest, not {bounds}",
        )
        check(
            not self.quanta or len(self.quanta) == len(bounds),
            "scheduler.quanta",
            f"needs one entry for each of scheduler.max_remaining_tokens ({len(bounds)}), not {len(self.quanta)}",
        )
        for name in ("window", "tree_nodes", "path_depth", "half_life", "prior_count", "ageing_seconds"):
            check(getattr(self, name) > 0, f"scheduler.{name}", f"must be positive, not {getattr(self, name)}")
        check(self.tail_power >= 1, "scheduler.tail_power", f"must be 1 or more, not {self.tail_power}")
        check(self.move_margin >= 1, "scheduler.move_margin", f"must be 1 or more, not {self.move_margin}")
        check(self.cache_share >= 0, "scheduler.cache_share", f"must not be negative, not {self.cache_share}")
        check(0 <= self.reserve < 1, "scheduler.reserve", f"must lie in [0, 1), not {self.reserve}")
        check(self.sticky_threshold >= 0, "scheduler.sticky_threshold", "must not be negative")
        check(self.predictor_sigma >= 0, "scheduler.predictor_sigma", "must not be negative")
        check(self.preempt_ratio > 1, "scheduler.preempt_ratio", f"must exceed 1, not {self.preempt_ratio}")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out tasks, attempted once each at the given version."""

    every: int = 0  # training steps between evaluations; also before the first and after the last; 0 is off
    tasks: int = 128
    temperature: float = 0.0  # 0 is greedy

    def __post_init__(self) -> None:
        check(self.every >= 0, "evaluation.every", "must not be negative")
        check(self.tasks > 0, "evaluation.tasks", "must be positive")
        check_finite(self.temperature, "evaluation.temperature")
        check(self.temperature >= 0, "evaluation.temperature", "must not be negative")


@dataclass(frozen=True)
class CheckpointConfig:
    """Composite checkpoints (one manifest each)."""

    every: int = 20  # training steps; 0 is off
    keep: int = 2  # newest manifests kept

    def __post_init__(self) -> None:
        check(self.every >= 0, "checkpoint.every", "must not be negative")
        check(self.keep > 0, "checkpoint.keep", "must be positive")


@dataclass(frozen=True)
class ClusterConfig:
    """Where actors live."""

    backend: str = "inprocess"  # inprocess: embedded on this machine; ray: placed by Ray
    address: str = ""  # ray: cluster to join; empty starts one embedded
    # ray: accelerators that a host has, and by which the run's are laid out over hosts (cluster/hosts.py); on CPU, that
    # stand for them. 0: no layout; workers go where Ray has room, and those that share weights must be on one host.
    accelerators_per_host: int = 0

    def __post_init__(self) -> None:
        check_choice(self.backend, ("inprocess", "ray"), "cluster.backend")
        check(
            self.accelerators_per_host >= 0,
            "cluster.accelerators_per_host",
            f"must not be negative, not {self.accelerators_per_host}",
        )
        check(
            self.backend == "ray" or not self.accelerators_per_host,
            "cluster.accelerators_per_host",
            "lays a run out over hosts, which needs cluster.backend=ray",
        )


@dataclass(frozen=True)
class TelemetryConfig:
    """Where a run reports."""

    console: bool = True  # live progress on a terminal; plain lines elsewhere
    tensorboard: bool = True
    wandb_project: str = ""  # empty is off
    report: bool = True  # report.html at the end
    port: int = 0  # of the health page and of Prometheus's metrics, in the coordinator's process; 0: off, -1: any
    host: str = "127.0.0.1"  # the address of this host that it listens at; beyond the loopback it needs a token
    token_env: str = ""  # environment variable that holds the token; readers send "Authorization: Bearer <token>"

    def __post_init__(self) -> None:
        check(-1 <= self.port <= 65535, "telemetry.port", f"must be a port, 0 (off) or -1 (any), not {self.port}")
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(
                f"config.telemetry.host: {self.host!r} is no address; give one of this host's, such as 127.0.0.1"
            ) from None
        check(
            not self.port or address.is_loopback or bool(self.token_env),
            "telemetry.host",
            f"{self.host} is reached from other hosts: name an environment variable that holds a token in "
            "telemetry.token_env, or leave it at 127.0.0.1",
        )


@dataclass(frozen=True)
class DeadlineConfig:
    """Longest waits, in seconds; passing one ends in an error that names the worker."""

    engine_start: float = 300.0
    trainer_start: float = 600.0
    cluster_start: float = 60.0  # Ray: it comes up or is joined, has room for the run's hosts, places an actor
    reward_start: float = 300.0  # of an actor that holds reward functions: its factories may load models
    first_token: float = 300.0  # between two deltas of a request that holds a slot
    placement: float = 300.0  # a request waits while a slot is free, beyond scheduler.ageing_seconds
    train_step: float = 1800.0
    publish: float = 300.0  # each verb of a weight update
    checkpoint: float = 1800.0
    transition: float = 120.0  # each state of a hybrid worker's way between rollout and training
    shutdown: float = 60.0
    grace: float = 60.0  # from SIGTERM to the end: what the scheduler gives before it kills (coordinator/stopping.py)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            check(getattr(self, item.name) > 0, f"deadlines.{item.name}", "must be positive")


@dataclass(frozen=True)
class PlannerConfig:
    """When the devices are split and laid out anew, and by what (`planning/planner.py`)."""

    period: int = 0  # training steps between two looks for a better plan; 0: the layout stays
    shadow: bool = False  # decide and log, and never move
    hardware: str = "cpu"  # accelerator whose sheet costs start from; cpu: this machine, measured on the spot
    profile: str = ""  # file of launch/calibrate.py: plans go by what was measured, not by the sheet
    degrees: tuple[int, ...] = (1, 2, 4, 8)  # tensor-parallel degrees of a plan, as far as they divide the model
    window: int = 2  # training steps whose trajectories say what the next ones will be like
    horizon: int = 20  # steps over which a move has to pay
    cooldown: int = 5  # steps after a move before the next
    least_gain: float = 0.05  # gain of a step, relative, below which nothing moves
    queue_pressure: float = 1.0  # requests waiting for a slot, over all slots, above which it looks early
    imbalance: float = 2.0  # times that a stage may take as long as the other before it looks early
    start_seconds: float = 10.8  # of an engine until it serves (published for a warm one: arXiv 2606.03077)
    resize_seconds: float = 8.0  # of a mesh: snapshot and recovery (likewise)

    def __post_init__(self) -> None:
        for name in ("period", "cooldown"):
            check(getattr(self, name) >= 0, f"planner.{name}", f"must not be negative, not {getattr(self, name)}")
        for name in ("window", "horizon"):
            check(getattr(self, name) > 0, f"planner.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("least_gain", "queue_pressure", "imbalance", "start_seconds", "resize_seconds"):
            value = getattr(self, name)
            check_finite(value, f"planner.{name}")
            check(value >= 0, f"planner.{name}", f"must not be negative, not {value}")
        check(self.imbalance >= 1, "planner.imbalance", f"must be at least 1, not {self.imbalance}")
        check(bool(self.degrees), "planner.degrees", "needs at least one degree")
        for degree in self.degrees:
            check(degree in (1, 2, 4, 8), "planner.degrees", f"{degree} is not one of 1, 2, 4, 8")


@dataclass(frozen=True)
class ElasticConfig:
    """Who may change sides while the run goes on (libra_jax/elastic)."""

    hybrid: int = 0  # so many of the instances, the last of rollout.tensor_parallel, also help to train
    floor: int = 1  # instances that always roll out, at least
    cores: tuple[int, ...] = ()  # on CPU: the core of each hybrid worker's replica; empty: not pinned
    resize: bool = False  # plans may change the trainer's mesh as well
    spare_devices: int = 0  # beyond its mesh's, devices that the trainer's process holds for a larger mesh
    gain: float = 0.05  # gain of a step, relative, below which no worker changes sides
    patience: int = 2  # looks in a row that have to say the same
    cooldown: int = 4  # steps after a change of a worker before its next
    late: float = 2.0  # a share is late after so many times what the core took for its own, and the core computes it
    late_seconds: float = 1.0  # and not before this
    restarts: int = 3  # times that a hybrid worker which failed is brought back to rollout

    def __post_init__(self) -> None:
        for name in ("hybrid", "spare_devices", "cooldown", "restarts"):
            check(getattr(self, name) >= 0, f"elastic.{name}", f"must not be negative, not {getattr(self, name)}")
        for name in ("floor", "patience"):
            check(getattr(self, name) > 0, f"elastic.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("gain", "late", "late_seconds"):
            check_finite(getattr(self, name), f"elastic.{name}")
            check(getattr(self, name) >= 0, f"elastic.{name}", f"must not be negative, not {getattr(self, name)}")


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    name: str = "run"  # names the default workdir
    seed: int = 0
    # Training steps. A workdir whose run has ended goes on when more are asked for; a learning rate that decays
    # (optimizer.schedule) is then where a run of so many steps from the start would have it: it jumps up.
    steps: int = 100
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)

    def __post_init__(self) -> None:
        check(bool(self.name), "name", "must not be empty: it names the default workdir")
        check("/" not in self.name, "name", f"must hold no '/', as it names the default workdir, not {self.name!r}")
        check(self.steps > 0, "steps", f"must be positive, not {self.steps}")
        check(self.seed >= 0, "seed", f"must not be negative, not {self.seed}")
        check(
            self.rollout.max_tokens < self.rollout.max_context,
            "rollout.max_tokens",
            f"{self.rollout.max_tokens} leaves no room for a prompt in max_context = {self.rollout.max_context}",
        )
        check(
            self.task.context_policy == "stop" or self.task.answer_tokens < self.rollout.max_context,
            "task.answer_tokens",
            f"{self.task.answer_tokens} leaves no room for anything else in rollout.max_context = "
            f"{self.rollout.max_context}; lower it, or set task.context_policy=stop",
        )
        self._check_sandbox()
        self._check_elastic()
        longest = max((self.trainer.row_tokens, *self.trainer.row_buckets))
        check(
            longest >= self.rollout.max_context,
            "trainer.row_tokens",
            f"the longest row ({longest}) must hold a whole context (rollout.max_context = {self.rollout.max_context})",
        )

    def _check_sandbox(self) -> None:
        for name in ("python", "shell", "edit"):
            check(
                name not in self.tools.use or self.sandbox.seconds < self.task.call_seconds,
                "sandbox.seconds",
                f"{self.sandbox.seconds:g} must be less than {_SHARE_OF_CALLS:.0%} of task.tool_seconds = "
                f"{self.task.tool_seconds:g}, or a step ends before a call of {name} may, which costs the attempt its "
                "files; lower it, or raise that",
            )

    def _check_elastic(self) -> None:
        elastic, instances = self.elastic, len(self.rollout.tensor_parallel)
        check(
            self.trainer.processes == 1 or self.cluster.backend == "ray",
            "trainer.processes",
            f"{self.trainer.processes} processes need cluster.backend=ray",
        )
        check(
            self.trainer.processes == 1 or not elastic.spare_devices,
            "elastic.spare_devices",
            f"are one process's, and trainer.processes is {self.trainer.processes}; set it to 0",
        )
        check(
            elastic.floor <= instances,
            "elastic.floor",
            f"{elastic.floor} instances cannot always roll out, as rollout.tensor_parallel has {instances}; lower it, "
            "or add instances",
        )
        if not elastic.hybrid:
            return
        check(
            elastic.hybrid + elastic.floor <= instances,
            "elastic.hybrid",
            f"of the {instances} instances of rollout.tensor_parallel, {elastic.hybrid} would be hybrid and fewer than "
            f"elastic.floor = {elastic.floor} left; lower either, or add instances",
        )
        check(
            len(elastic.cores) in (0, elastic.hybrid),
            "elastic.cores",
            f"has {len(elastic.cores)} entries for {elastic.hybrid} hybrid workers; give one each, or none",
        )
        check(
            self.rollout.transport == "memfd",
            "elastic.hybrid",
            f"replicas read parameters from host memory: rollout.transport must be memfd, not {self.rollout.transport}",
        )
        check(
            self.rollout.dtype in (self.model.param_dtype, self.model.compute_dtype),
            "elastic.hybrid",
            f"replicas train on the published parameters: rollout.dtype = {self.rollout.dtype} must be that of "
            f"model.param_dtype ({self.model.param_dtype}) or model.compute_dtype ({self.model.compute_dtype})",
        )
        check(
            self.algorithm.kl_coefficient == 0,
            "elastic.hybrid",
            "replicas hold no reference model: algorithm.kl_coefficient must be 0",
        )


def slots_by_degree(degrees: Sequence[int], slots: Sequence[int]) -> dict[int, int]:
    """The slots of an instance of each degree that a layout has; of several instances the first one's.

    Args:
      degrees: tensor-parallel degree of each instance.
      slots: of each; where there are fewer, the instances left have none of their own.
    """
    return dict(reversed(list(zip(degrees, slots, strict=False))))


MOVED = {"task.reward": 'reward.functions, e.g. {"mine": {"factory": "package.module:factory"}}'}
"""Fields of former versions, and where they are now."""

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass tree as nested plain dicts (tuples kept)."""
    return {
        item.name: to_dict(value) if dataclasses.is_dataclass(value := getattr(config, item.name)) else value
        for item in dataclasses.fields(config)
    }


def parse(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Builds the dataclass `cls` from nested mappings.

    Raises:
      ConfigError: a field is unknown (the nearest name is offered), of the wrong type, or out of range.
    """
    types = get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {prefix}{near[0]!s}?" if near else f"; its fields are {', '.join(sorted(known))}"
            if moved := MOVED.get(f"{prefix}{name}"):
                hint = f"; it is config.{moved} now"
            raise ConfigError(f"config.{prefix}{name}: no such field{hint}")
        kind = types[name]
        if dataclasses.is_dataclass(kind):
            check(isinstance(value, Mapping), f"{prefix}{name}", "must be a group of fields")
            arguments[name] = parse(kind, value, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            arguments[name] = _coerce(value, kind, f"{prefix}{name}")
    return cls(**arguments)


def _coerce(value: Any, kind: Any, name: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (bool, int, float, str):
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        check(right, name, f"must be of type {kind.__name__}, not {value!r}")
        return value
    if "tuple" in str(kind):
        check(isinstance(value, list | tuple), name, f"must be a tuple, not {value!r}")
        holds, called = (str, "strings") if "str" in str(kind) else (int, "integers")
        check(all(isinstance(item, holds) for item in value), name, f"must hold {called}, not {value!r}")
        return tuple(value)
    check(isinstance(value, Mapping), name, f"must be a mapping, not {value!r}")
    return dict(value)


def identity(config: RunConfig) -> dict[str, Any]:
    """What makes two configs the same run, as nested plain dicts: all but its steps and the cluster's address."""
    values = to_dict(config)
    del values["steps"]
    values["cluster"]["address"] = ""
    return values


def digest(config: RunConfig) -> str:
    """Eight hex digits that change when any field of the run's identity does; names the default workdir."""
    text = json.dumps(identity(config), sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
