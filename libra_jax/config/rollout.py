"""Settings of the engines, and of which of them serves a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from libra_jax.config.checks import check, check_choice, check_temperature
from libra_jax.config.group import group


@group
@dataclass
class RolloutConfig:
    """The engines, and how tokens are drawn."""

    engine: str = "vllm"  # vllm; fake is the test double
    tensor_parallel: tuple[int, ...] = (1,)  # one instance an entry: devices that share its weights
    slots: int = 64  # requests an instance decodes at once (vLLM's max_num_seqs)
    slots_by_instance: tuple[int, ...] = ()  # the same, one entry an instance of tensor_parallel; empty: slots for all
    max_context: int = 512  # longest context, in tokens (prompt, tools and generated)
    max_tokens: int = 96  # generated tokens a turn
    temperature: float = 1.0  # sampling temperature, 0.01 to 2; the trainer scores with the same
    top_p: float = 1.0  # refused below 1: every loss here is a function of probability ratios (log-prob contract)
    top_k: int = 0  # 0 is off; refused above 0, as top_p is below 1
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
        check_temperature(self.temperature, "rollout.temperature")
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


@group
@dataclass
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


@group
@dataclass
class SchedulerConfig:
    """Which rollout instance serves a request next (libra_jax/scheduling). Tokens are generated ones."""

    # cmlfq, cmlfq_paper (as published), round_robin, least_loaded, sticky, mlfq, length_predictor, heddle; oracle knows
    # every length beforehand, in simulations.
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
    move_margin: float = (
        8.0  # cmlfq: multiple of its seconds that a move costs, as loads even out before it has paid off
    )
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


def slots_by_degree(degrees: Sequence[int], slots: Sequence[int]) -> dict[int, int]:
    """The slots of an instance of each degree that a layout has; of several instances the first one's.

    Args:
      degrees: tensor-parallel degree of each instance.
      slots: of each; where there are fewer, the instances left have none of their own.
    """
    return dict(reversed(list(zip(degrees, slots, strict=False))))
