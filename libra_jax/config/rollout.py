"""Settings of the engines, and of the scheduler that routes requests to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax.config.arguments import check_arguments
from libra_jax.config.checks import DEGREES, check
from libra_jax.config.engine_arguments import check_engine_arguments
from libra_jax.config.fields import SAMPLED, field
from libra_jax.config.group import group


@dataclass
@group("rollout")
class RolloutConfig:
    """The engines and their sampling."""

    engine: str = field("vllm", choices=("vllm", "fake"))  # inference engine: vllm; fake is the test double
    # Tensor-parallel degree of each instance.
    tensor_parallel: tuple[int, ...] = field((1,), choices=DEGREES, nonempty=True)
    # Accelerator of each instance, by the name of its sheet (docs/guides/mixed_hardware.md); empty: all have the same.
    accelerators: tuple[str, ...] = ()
    slots: int = field(64, gt=0)  # requests an instance decodes at once (vLLM's max_num_seqs)
    slots_by_instance: tuple[int, ...] = field((), gt=0)  # slots of each instance; empty: slots for all
    max_context: int = field(512, gt=0)  # longest context, in tokens (prompt, tools and generated)
    max_tokens: int = field(96, gt=0)  # most generated tokens of a turn
    # Sampling temperature, 0.01 to 2; the trainer scores with the same.
    temperature: float = field(1.0, **SAMPLED)
    # Refused below 1: every loss here is a function of probability ratios (log-prob contract).
    top_p: float = field(1.0, gt=0, le=1)
    top_k: int = field(0, ge=0)  # 0 is off; refused above 0, for the reason of top_p
    # Dtype of engine weights, and of weight sync on the wire.
    dtype: str = field("float32", choices=("float32", "bfloat16", "float16"))
    kv_cache_gib: float = field(0.5, gt=0)  # GiB of KV cache of an instance on CPU
    # On CPU: the core of each worker, instance by instance; empty: not pinned. Under Ray, all processes of an instance
    # stay on its cores.
    cores: tuple[int, ...] = ()
    gpu_memory_fraction: float = field(0.85, gt=0, le=1)  # share of a device's memory for the engine (CUDA)
    stream_interval: int = field(16, gt=0)  # tokens between two deltas of a request
    enforce_eager: bool = True  # start without compiled graphs, which is faster; set False on GPU
    # Further arguments of vLLM's AsyncEngineArgs, e.g. {"max_num_batched_tokens": 8192}; docs/guides/engine_options.md.
    # Arguments that break the log-prob contract, or that other settings give, are refused by name.
    engine_arguments: Mapping[str, Any] = field(default_factory=dict, needs=("engine", "vllm"))
    # Transport of weights: memfd (any device; a weight relay on every other host), ipc (GPUs of the trainer's
    # only process), nccl (other GPUs; any number of instances and of the trainer's processes).
    transport: str = field("memfd", choices=("memfd", "ipc", "nccl"))
    chunk_mib: int = field(256, gt=0)  # MiB of a chunk of weights
    # Most engines of a host that take new weights at once; 0: all. The others decode meanwhile, under older weights.
    # Those after the first stop for the load alone, and not until the trainer has gathered its weights. memfd only.
    sync_at_once: int = field(0, ge=0, needs=("transport", "memfd"))
    # Weight syncs from one that sends whole chunks to the next. Those between send changed elements only to other
    # hosts, which takes memory for one more snapshot on the trainer's host. 1: all send whole chunks. memfd only.
    full_sync_every: int = field(1, gt=0, needs=("transport", "memfd"))
    # Engines compare the xxh3 checksum of each chunk, on one host, too. Weight relays between hosts and hybrid workers
    # compare it in any case.
    checksum: bool = False
    # Processes that run the agent loops (environments, tools, rewards) beside the engines; 0: the coordinator does.
    # Several machines share them, those that roll out (docs/concepts/loop_workers.md).
    loop_workers: int = field(0, ge=0)
    generation_retries: int = field(8, ge=0)  # times a request may be resumed after its engine failed
    restarts: int = field(3, ge=0)  # times that a dead engine is restarted
    health_seconds: float = field(10.0, gt=0)  # seconds between two health checks of an instance

    def __post_init__(self) -> None:
        check_engine_arguments(self.engine_arguments)
        instances, workers = len(self.tensor_parallel), sum(self.tensor_parallel)
        for name, count, counted in (
            ("accelerators", instances, "instances"),
            ("slots_by_instance", instances, "instances"),
            ("cores", workers, "workers"),
        ):
            entries = len(getattr(self, name))
            check(
                entries in (0, count),
                f"rollout.{name}",
                f"has {entries} entries for the {count} {counted} of tensor_parallel; give one each, or none",
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

    # Seconds of one decode step of one request with no context, at tensor-parallel degree 1.
    step_seconds: float = field(0.02, gt=0)
    request_seconds: float = field(1e-4, ge=0)  # seconds that each further request adds to the step
    context_seconds: float = field(1e-7, ge=0)  # seconds that each token of context adds to the step
    # Share of each further device that tensor parallelism turns into speed; 1 is perfect.
    scaling: float = field(0.7, ge=0, le=1)
    # Prefill speed at degree 1, for moves that prefill the context again.
    prefill_tokens_per_second: float = field(6000.0, gt=0)


@dataclass
@group("scheduler")
class SchedulerConfig:
    """Choice of the rollout instance that serves a request (libra_jax/scheduling). Tokens are generated ones."""

    # Policy: cmlfq, cmlfq_paper (as published), cmlfq_authors (as their code applies it), round_robin, least_loaded,
    # sticky, sticky_cache, mlfq, length_predictor, heddle; oracle and clairvoyant know every length, in simulations.
    policy: str = field("cmlfq", choices=POLICIES)
    # Arguments of the policy (docs/concepts/cmlfq.md), such as {"move_margin": 1.0} of cmlfq.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # Upper bounds of the buckets in tokens, one for each tensor-parallel degree but the largest.
    max_remaining_tokens: tuple[int, ...] = field((), gt=0, ascending=True)
    # Order inside a bucket: auto (as the policy was published), fcfs, longest_first, ...
    ordering: str = field("auto", choices=ORDERINGS)
    # Seconds of waiting after which a request goes before all others, to any instance.
    ageing_seconds: float = field(900.0, gt=0, infinite=True)
    window: int = field(200, gt=0)  # remaining lengths that a node of a prefix tree keeps
    tree_nodes: int = field(50_000, gt=0)  # most nodes of a prefix tree; the least recently used are dropped
    path_depth: int = field(16, gt=0)  # tool returns of a path that a prefix tree distinguishes
    half_life: int = field(4096, gt=0)  # finished trajectories after which unrenewed evidence weighs half
    learnt_from: tuple[str, ...] = ()  # workdirs of other runs, whose schedulers' evidence this run starts with
    # cmlfq, heddle: what predicts the tokens left. causes: tool returns, siblings and the tokens so far;
    # blind: without what tools returned; mean: one distribution of lengths for all requests, and the tokens so far.
    evidence: str = field("causes", choices=("causes", "blind", "mean"))
    # Segments of a rollout (summarised histories, sub-agents). related: a segment goes where its parent's context is,
    # and is compared with siblings' segments of its number; independent: a request that has nothing to do with others.
    segments: str = field("related", choices=("related", "independent"))
    prior_count: float = field(8.0, gt=0)  # cmlfq: samples at which a node weighs as much as the wider evidence
    # Which instance with a free slot takes a new request. slots: any; cache: one whose KV cache has room for it beside
    # those that it serves; auto: cache for cmlfq, sticky_cache, oracle and clairvoyant, slots for the others.
    admission: str = field("auto", choices=("auto", "slots", "cache"))
    # Admission by cache: share of an instance's KV cache that its requests may fill.
    cache_share: float = field(0.9, gt=0)
    costs: CostConfig = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        check_arguments(self.policy, self.arguments, "scheduler.arguments")


def slots_by_degree(degrees: Sequence[int], slots: Sequence[int]) -> dict[int, int]:
    """Returns the slots of the first instance of each tensor-parallel degree.

    Args:
      degrees: tensor-parallel degree of each instance.
      slots: slots of each instance; further instances have none of their own.
    """
    return dict(reversed(list(zip(degrees, slots, strict=False))))
