"""Settings of the engines, and of the scheduler that routes requests to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax.config.arguments import check_arguments
from libra_jax.config.checks import check, check_choice, check_temperature
from libra_jax.config.engine_arguments import FIELD, check_engine_arguments
from libra_jax.config.group import group


@dataclass
@group("rollout")
class RolloutConfig:
    """The engines and their sampling."""

    engine: str = "vllm"  # inference engine: vllm; fake is the test double
    tensor_parallel: tuple[int, ...] = (1,)  # tensor-parallel degree of each instance
    # Accelerator of each instance, by the name of its sheet (docs/guides/mixed_hardware.md); empty: all have the same.
    accelerators: tuple[str, ...] = ()
    slots: int = 64  # requests an instance decodes at once (vLLM's max_num_seqs)
    slots_by_instance: tuple[int, ...] = ()  # slots of each instance; empty: slots for all
    max_context: int = 512  # longest context, in tokens (prompt, tools and generated)
    max_tokens: int = 96  # most generated tokens of a turn
    temperature: float = 1.0  # sampling temperature, 0.01 to 2; the trainer scores with the same
    top_p: float = 1.0  # refused below 1: every loss here is a function of probability ratios (log-prob contract)
    top_k: int = 0  # 0 is off; refused above 0, for the reason of top_p
    dtype: str = "float32"  # dtype of engine weights, and of weight sync on the wire
    kv_cache_gib: float = 0.5  # GiB of KV cache of an instance on CPU
    # On CPU: the core of each worker, instance by instance; empty: not pinned. Under Ray, all processes of an instance
    # stay on its cores.
    cores: tuple[int, ...] = ()
    gpu_memory_fraction: float = 0.85  # share of a device's memory for the engine (CUDA)
    stream_interval: int = 16  # tokens between two deltas of a request
    enforce_eager: bool = True  # start without compiled graphs, which is faster; set False on GPU
    # Further arguments of vLLM's AsyncEngineArgs, e.g. {"max_num_batched_tokens": 8192}; docs/guides/engine_options.md.
    # Arguments that break the log-prob contract, or that other settings give, are refused by name.
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Transport of weights: memfd (any device; a weight relay on every other host), ipc (GPUs of the trainer's
    # only process), nccl (other GPUs; any number of instances and of the trainer's processes).
    transport: str = "memfd"
    chunk_mib: int = 256  # MiB of a chunk of weights
    # Most engines of a host that take new weights at once; 0: all. The others decode meanwhile, under older weights.
    # Those after the first stop for the load alone, and not until the trainer has gathered its weights. memfd only.
    sync_at_once: int = 0
    # Weight syncs from one that sends whole chunks to the next. Those between send changed elements only to other
    # hosts, which takes memory for one more snapshot on the trainer's host. 1: all send whole chunks. memfd only.
    full_sync_every: int = 1
    # Engines compare the xxh3 checksum of each chunk, on one host, too. Weight relays between hosts and hybrid workers
    # compare it in any case.
    checksum: bool = False
    # Processes that run the agent loops (environments, tools, rewards) beside the engines; 0: the coordinator does.
    # Several machines share them, those that roll out (docs/concepts/loop_workers.md).
    loop_workers: int = 0
    generation_retries: int = 8  # times a request may be resumed after its engine failed
    restarts: int = 3  # times that a dead engine is restarted
    health_seconds: float = 10.0  # seconds between two health checks of an instance

    def __post_init__(self) -> None:
        check_choice(self.engine, ("vllm", "fake"), "rollout.engine")
        check_engine_arguments(self.engine_arguments)
        check(
            not self.engine_arguments or self.engine == "vllm",
            FIELD,
            f"are vLLM's, and rollout.engine={self.engine} takes none; leave them out",
        )
        check(len(self.tensor_parallel) > 0, "rollout.tensor_parallel", "needs at least one instance")
        for degree in self.tensor_parallel:
            check(degree in (1, 2, 4, 8), "rollout.tensor_parallel", f"{degree} is not one of 1, 2, 4, 8")
        check(
            len(self.accelerators) in (0, len(self.tensor_parallel)),
            "rollout.accelerators",
            f"has {len(self.accelerators)} entries for the {len(self.tensor_parallel)} instances of tensor_parallel; "
            "give one each, or none",
        )
        for name in ("slots", "max_context", "max_tokens", "stream_interval", "chunk_mib", "full_sync_every"):
            check(getattr(self, name) > 0, f"rollout.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("generation_retries", "restarts", "top_k", "loop_workers"):
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
        check(self.health_seconds > 0, "rollout.health_seconds", f"must be positive, not {self.health_seconds}")
        check_temperature(self.temperature, "rollout.temperature")
        check(0 < self.top_p <= 1, "rollout.top_p", f"must lie in (0, 1], not {self.top_p}")
        fraction = self.gpu_memory_fraction
        check(0 < fraction <= 1, "rollout.gpu_memory_fraction", f"must lie in (0, 1], not {fraction}")
        check(self.kv_cache_gib > 0, "rollout.kv_cache_gib", f"must be positive, not {self.kv_cache_gib}")
        check_choice(self.dtype, ("float32", "bfloat16", "float16"), "rollout.dtype")
        check_choice(self.transport, ("memfd", "ipc", "nccl"), "rollout.transport")
        check(self.sync_at_once >= 0, "rollout.sync_at_once", f"must not be negative, not {self.sync_at_once}")
        check(
            not self.sync_at_once or self.transport == "memfd",
            "rollout.sync_at_once",
            f"rollout.transport={self.transport} sends each version once, to all engines; set it to 0, or use memfd",
        )
        check(
            self.full_sync_every == 1 or self.transport == "memfd",
            "rollout.full_sync_every",
            f"rollout.transport={self.transport} always sends whole weights; set it to 1, or use memfd",
        )

    @property
    def kinds(self) -> tuple[tuple[int, str], ...]:
        """Degree and accelerator of each instance (`protocols.Kind`)."""
        return tuple(zip(self.tensor_parallel, self.accelerators or ("",) * len(self.tensor_parallel), strict=True))

    @property
    def instance_slots(self) -> tuple[int, ...]:
        """Slots of each instance."""
        return self.slots_by_instance or (self.slots,) * len(self.tensor_parallel)


POLICIES = (
    "cmlfq",
    "cmlfq_paper",
    "cmlfq_authors",
    "round_robin",
    "least_loaded",
    "sticky",
    "sticky_cache",
    "mlfq",
    "length_predictor",
    "heddle",
    "oracle",
    "clairvoyant",
)
ORDERINGS = ("auto", "fcfs", "longest_first", "shortest_first", "oldest_longest_first", "group_completion")


@dataclass
@group("scheduler.costs")
class CostConfig:
    """Costs of serving on real engines, as the scheduler sees them (libra_jax/scheduling/costs.py).

    The defaults are of the order of a 14-billion-parameter model on 80 GB GPUs. The simulator has its own model.
    """

    step_seconds: float = 0.02  # seconds of one decode step of one request with no context, at tensor-parallel degree 1
    request_seconds: float = 1e-4  # seconds that each further request adds to the step
    context_seconds: float = 1e-7  # seconds that each token of context adds to the step
    scaling: float = 0.7  # share of each further device that tensor parallelism turns into speed; 1 is perfect
    prefill_tokens_per_second: float = 6000.0  # prefill speed at degree 1, for moves that prefill the context again

    def __post_init__(self) -> None:
        for name in ("step_seconds", "prefill_tokens_per_second"):
            check(getattr(self, name) > 0, f"scheduler.costs.{name}", f"must be positive, not {getattr(self, name)}")
        for name in ("request_seconds", "context_seconds"):
            value = getattr(self, name)
            check(value >= 0, f"scheduler.costs.{name}", f"must not be negative, not {value}")
        check(0 <= self.scaling <= 1, "scheduler.costs.scaling", f"must lie in [0, 1], not {self.scaling}")


@dataclass
@group("scheduler")
class SchedulerConfig:
    """Choice of the rollout instance that serves a request (libra_jax/scheduling). Tokens are generated ones."""

    # Policy: cmlfq, cmlfq_paper (as published), cmlfq_authors (as their code applies it), round_robin, least_loaded,
    # sticky, sticky_cache, mlfq, length_predictor, heddle; oracle and clairvoyant know every length, in simulations.
    policy: str = "cmlfq"
    # Arguments of the policy (docs/concepts/cmlfq.md), such as {"move_margin": 1.0} of cmlfq.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    max_remaining_tokens: tuple[
        int, ...
    ] = ()  # upper bounds of the buckets in tokens, one for each tensor-parallel degree but the largest
    ordering: str = "auto"  # order inside a bucket: auto (as the policy was published), fcfs, longest_first, ...
    ageing_seconds: float = 900.0  # seconds of waiting after which a request goes before all others, to any instance
    window: int = 200  # remaining lengths that a node of a prefix tree keeps
    tree_nodes: int = 50_000  # most nodes of a prefix tree; the least recently used are dropped
    path_depth: int = 16  # tool returns of a path that a prefix tree distinguishes
    half_life: int = 4096  # finished trajectories after which unrenewed evidence weighs half
    learnt_from: tuple[str, ...] = ()  # workdirs of other runs, whose schedulers' evidence this run starts with
    # cmlfq, heddle: what predicts the tokens left. causes: tool returns, the course of turns, siblings, tokens so far;
    # blind: without what tools returned; mean: one distribution of lengths for all requests, and the tokens so far.
    evidence: str = "causes"
    # Segments of a rollout (summarised histories, sub-agents). related: a segment goes where its parent's context is,
    # and is compared with siblings' segments of its number; independent: a request that has nothing to do with others.
    segments: str = "related"
    prior_count: float = 8.0  # cmlfq: samples at which a node weighs as much as the wider evidence
    # Which instance with a free slot takes a new request. slots: any; cache: one whose KV cache has room for it beside
    # those that it serves; auto: cache for cmlfq, sticky_cache, oracle and clairvoyant, slots for the others.
    admission: str = "auto"
    cache_share: float = 0.9  # admission by cache: share of an instance's KV cache that its requests may fill
    costs: CostConfig = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        check_choice(self.policy, POLICIES, "scheduler.policy")
        check_arguments(self.policy, self.arguments, "scheduler.arguments")
        check_choice(self.ordering, ORDERINGS, "scheduler.ordering")
        check_choice(self.evidence, ("causes", "blind", "mean"), "scheduler.evidence")
        check_choice(self.segments, ("related", "independent"), "scheduler.segments")
        bounds = self.max_remaining_tokens
        check(all(bound > 0 for bound in bounds), "scheduler.max_remaining_tokens", f"must be positive, not {bounds}")
        check(
            list(bounds) == sorted(set(bounds)),
            "scheduler.max_remaining_tokens",
            f"must ascend from the narrowest bucket to the widest, not {bounds}",
        )
        for name in ("window", "tree_nodes", "path_depth", "half_life", "prior_count", "ageing_seconds"):
            check(getattr(self, name) > 0, f"scheduler.{name}", f"must be positive, not {getattr(self, name)}")
        check_choice(self.admission, ("auto", "slots", "cache"), "scheduler.admission")
        check(self.cache_share > 0, "scheduler.cache_share", f"must be positive, not {self.cache_share}")


def slots_by_degree(degrees: Sequence[int], slots: Sequence[int]) -> dict[int, int]:
    """Returns the slots of the first instance of each tensor-parallel degree.

    Args:
      degrees: tensor-parallel degree of each instance.
      slots: slots of each instance; further instances have none of their own.
    """
    return dict(reversed(list(zip(degrees, slots, strict=False))))
