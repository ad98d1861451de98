"""Settings of the policy, the objective, the optimizer and the trainer."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax.config.checks import check, check_choice, check_finite, check_function, divisors, multiples
from libra_jax.config.group import group

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections of a layer, as Hugging Face names them."""

MOST_RANK = 512
"""Largest rank that vLLM's LoRA runtime serves (vllm/config/lora.py, 0.32)."""


@group
@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685). A run with a rank above 0 trains adapters, and freezes all weights.

    The frozen weights are stored once, in model.compute_dtype, without gradients and optimizer moments. They are also
    the reference model of the KL term. A warm start still trains all weights, and the adapters begin after it.
    """

    rank: int = 0  # rank of the adapters, 1 to 512; 0 is off: the run trains all weights
    alpha: float = 32.0  # the product of an adapter is scaled by alpha / rank
    # Projections that get an adapter. With experts: q_proj, k_proj, v_proj and o_proj only, with sync=merge.
    targets: tuple[str, ...] = PROJECTIONS
    layers: tuple[int, ...] = ()  # numbers of the layers that get adapters, ascending from 0; empty: all layers
    # What a weight sync sends: adapter (the adapter alone, to vLLM's LoRA runtime; needs rollout.transport=memfd), or
    # merge (all weights, with the adapter added). With merge and rollout.dtype=bfloat16, the sum is rounded.
    sync: str = "adapter"
    path: str = ""  # directory of a PEFT adapter to start from; empty: A is random and B is 0

    def __post_init__(self) -> None:
        check(
            0 <= self.rank <= MOST_RANK,
            "model.lora.rank",
            f"must lie in [0, {MOST_RANK}], not {self.rank}; 0 trains all weights",
        )
        check_finite(self.alpha, "model.lora.alpha")
        check(self.alpha > 0, "model.lora.alpha", f"must be positive, not {self.alpha}")
        check(len(self.targets) > 0, "model.lora.targets", f"must name a projection: {', '.join(PROJECTIONS)}")
        for name in self.targets:
            check_choice(name, PROJECTIONS, "model.lora.targets")
        check(len(set(self.targets)) == len(self.targets), "model.lora.targets", "names a projection twice")
        layers = list(self.layers)
        check(
            layers == sorted(set(layers)) and all(layer >= 0 for layer in layers),
            "model.lora.layers",
            f"must ascend from 0 or more, not {self.layers}",
        )
        check_choice(self.sync, ("adapter", "merge"), "model.lora.sync")
        check(
            self.rank > 0 or not self.path,
            "model.lora.path",
            "has no effect with model.lora.rank=0; set the adapter's rank, or leave it out",
        )


@group
@dataclass
class ModelConfig:
    """The policy. Set `path` for pretrained weights, or `preset` for random initial ones."""

    preset: str = "libra-tiny"  # name of a shipped config.json (libra_jax/models/presets), used where path is empty
    path: str = ""  # Hugging Face model directory (config.json, *.safetensors, tokenizer files), or an id on the hub
    # Dtype of activations and matrix products: float32 or bfloat16. On GPUs and TPUs float32 sets
    # jax_default_matmul_precision=highest, unless JAX_DEFAULT_MATMUL_PRECISION is set. By default products would take
    # TF32 or bfloat16 inputs, and the trainer's log-probabilities would differ from the engine's.
    compute_dtype: str = "float32"
    param_dtype: str = "float32"  # dtype of master weights and optimizer moments; only float32
    # Activations that the backward pass recomputes: none, dots (all but matmul outputs), full (all but the layers'
    # inputs), offload (like full, with the layers' inputs in the host's memory meanwhile).
    remat: str = "none"
    # Kernel: chunked (any device), splash (TPU), cudnn (NVIDIA GPU, bfloat16; packed rows from Hopper on), or auto: the
    # device's own kernel where it can compute the rows, else chunked.
    attention: str = "auto"
    attention_chunk: int = 512  # queries and keys of a block of the chunked online softmax
    # Tokens whose vocabulary logits are in memory at once, on each device. Each device loops over its own rows.
    logits_chunk: int = 1024
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_choice(self.compute_dtype, ("float32", "bfloat16"), "model.compute_dtype")
        check(
            self.param_dtype != "bfloat16",
            "model.param_dtype",
            "bfloat16 has 8 significant bits, so it rounds away every update below 1/512 of a weight: at a learning "
            "rate of 1e-6, 100 Adam steps move 2% of the weights; keep float32, and compute in bfloat16 "
            "(model.compute_dtype). To save memory raise trainer.fsdp",
        )
        check_choice(self.param_dtype, ("float32",), "model.param_dtype")
        check_choice(self.remat, ("none", "dots", "full", "offload"), "model.remat")
        check_choice(self.attention, ("auto", "chunked", "splash", "cudnn"), "model.attention")
        check(self.attention_chunk > 0, "model.attention_chunk", f"must be positive, not {self.attention_chunk}")
        check(self.logits_chunk > 0, "model.logits_chunk", f"must be positive, not {self.logits_chunk}")


ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "distillation",
    "gae",
)
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Advantages that compare the rewards of a group."""
LOSSES = ("clipped", "gspo", "cispo", "sapo", "gmpo", "bapo", "clip_cov", "kl_cov")
BATCH_LOSSES = ("bapo", "clip_cov", "kl_cov")
"""Losses that take statistics of all tokens of an update: the policy scores them before the update."""
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
FILTERS = ("none", "zero_variance")
BUDGETS = ("uniform", "knapsack")
CORRECTIONS = ("none", "truncated", "masked")
KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


@group
@dataclass
class AlgorithmConfig:
    """The objective. Functions and references: libra_jax/algorithms."""

    # Advantage estimator: grpo, dr_grpo, rloo, opo, reinforce_plus_plus_baseline (all compare a group),
    # reinforce_plus_plus, distillation (needs teacher), gae (needs critic.enabled), or "package.module:function" (see
    # docs/guides/own_loss.md).
    advantage: str = "grpo"
    # Keyword arguments of the advantage: reward_weight of distillation; discount, turn_discount, trace_decay and
    # whitened of gae; or those of your function.
    advantage_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Policy loss: clipped (PPO's), gspo (ratio of a sequence), cispo (clipped importance weight), sapo (soft gate),
    # gmpo (geometric mean), bapo (adaptive bounds), clip_cov, kl_cov (covariance of advantage and log-probability), or
    # "package.module:function" (see docs/guides/own_loss.md).
    loss: str = "clipped"
    # Keyword arguments of the loss (libra_jax/algorithms/losses.py and batch_statistics.py), or those of your function.
    loss_arguments: Mapping[str, Any] = field(default_factory=dict)
    clip_low: float = 0.2  # distance below 1 at which the ratio is clipped
    clip_high: float = 0.2  # distance above 1 at which the ratio is clipped; DAPO uses 0.28
    dual_clip: float = 0.0  # clipped loss: lower bound factor for negative advantages; 0 is off (else above 1)
    # Mean of token losses: token_mean, sequence_mean, sequence_sum (see sequence_length_constant).
    aggregation: str = "token_mean"
    sequence_length_constant: float = 1.0  # divisor of sequence_sum
    # Denominator of the ratio: behaviour (the sampling policy) or decoupled (the proximal policy, at the step's start).
    # With one update a batch the decoupled ratio is 1 and no clip binds. Its gradient is that of -weight * advantage *
    # log-probability, with the weight of `correction`; changed clips are refused.
    objective: str = "behaviour"
    # Source of the decoupled objective's proximal policy: recompute (the policy before the batch's first update, one
    # more forward pass with several updates), interpolate (between the behaviour and the current policy, by staleness:
    # A-3PO).
    proximal: str = "recompute"
    minibatches: int = 1  # parts of a batch, of whole groups; each takes an update of its own
    epochs: int = 1  # passes over a batch's mini-batches
    correction: str = "none"  # importance sampling of the proximal over the behaviour policy: none, truncated, masked
    # Largest importance weight: larger ones are cut to it (truncated), or their tokens dropped (masked).
    correction_cap: float = 2.0
    correction_floor: float = 0.0  # smallest importance weight; masked drops the tokens of smaller ones, too
    # Ratio that the correction looks at: token (its own), sequence (product over its trajectory), geometric (geometric
    # mean over its trajectory).
    correction_level: str = "token"
    # Scale of the learning rate by the effective sample size, a share of the trajectories: off, sqrt (for Adam and its
    # relatives), linear (for sgd).
    ess_scaling: str = "off"
    kl_coefficient: float = 0.0  # weight of the KL term; above 0 a frozen reference model lives on the trainer's mesh
    # Hugging Face directory of the frozen reference model of the KL term, such as a larger teacher with the policy's
    # vocabulary; empty: the initial policy.
    teacher: str = ""
    # Estimator of the KL: k1, k2, k3; k1+ and k3+ have the value of k1 and k3 and the gradient of k2.
    kl_estimator: str = "k3"
    kl_in_reward: bool = False  # KL subtracted from each token's reward, instead of added to the loss
    entropy_coefficient: float = 0.0  # weight of the entropy that the loss rewards
    balance_coefficient: float = 0.0  # weight of the load-balance loss of a mixture's routers (`router/balance`)
    router_z_coefficient: float = 0.0  # weight of the z-loss of a mixture's routers (`router/z`)
    # Experts of a mixture's tokens in training: off (the trainer's own), rollout (those that the engine chose: routing
    # replay, which keeps the ratio of engine and trainer near 1).
    routing_replay: str = "off"
    # Finished groups that are replaced by others (counted, capped by coordinator.max_replacements): none, zero_variance
    # (all rollouts have the same reward of the environment; with reward.environment_weight=0, of the functions), or
    # "package.module:function". Your function(group, **filter_arguments) returns a reason, or None to keep the group.
    filter: str = "none"
    # Keyword arguments of your filter; the built-in filters take none.
    filter_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Tokens before a rollout's limit over which its reward falls by overlong_penalty (DAPO, arXiv 2503.14476). 0 is
    # off. The limit is task.max_tokens, or without it rollout.max_tokens x task.max_turns. Only training rewards fall:
    # algorithm.filter, reward/environment and evaluations see them without the penalty.
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0  # reward that a rollout at its token limit loses
    # Rollouts of each prompt, coordinator.group_size on average over groups_per_step prompts: uniform (all equal),
    # knapsack (most where past success rates promise most: arXiv 2509.25849; group_size for prompts without past
    # rollouts), or "package.module:function" (see docs/guides/prompts.md).
    budget: str = "uniform"
    budget_arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of your budget
    budget_least: int = 2  # fewest rollouts of a prompt, unless the budget is uniform
    budget_most: int = 0  # most rollouts of a prompt, unless the budget is uniform; 0: 4 x coordinator.group_size
    # Reward, without shaping, from which on a rollout is a success. Read by algorithm.budget and task.order.
    success_reward: float = 1.0
    # Rollouts of a prompt that its success rate remembers: each further one takes 1/success_window off the weight of
    # those before.
    success_window: int = 32

    def __post_init__(self) -> None:
        check_function(self.advantage, ADVANTAGES, self.advantage_arguments, "algorithm.advantage")
        check_function(self.loss, LOSSES, self.loss_arguments, "algorithm.loss")
        check_function(self.filter, FILTERS, self.filter_arguments, "algorithm.filter")
        check(
            ":" in self.filter or not self.filter_arguments,
            "algorithm.filter_arguments",
            f"algorithm.filter={self.filter} takes none; leave it empty, or name a function of your own there",
        )
        check_function(self.budget, BUDGETS, self.budget_arguments, "algorithm.budget")
        check(
            ":" in self.budget or not self.budget_arguments,
            "algorithm.budget_arguments",
            f"algorithm.budget={self.budget} takes none; leave it empty, or name a function of your own there",
        )
        check(self.budget_least > 0, "algorithm.budget_least", f"must be positive, not {self.budget_least}")
        check(
            self.budget_most == 0 or self.budget_most >= self.budget_least,
            "algorithm.budget_most",
            f"must be 0 (4 x coordinator.group_size) or at least budget_least = {self.budget_least}, not "
            f"{self.budget_most}",
        )
        for name, default in (("budget_least", 2), ("budget_most", 0)):
            check(
                self.budget != "uniform" or getattr(self, name) == default,
                f"algorithm.{name}",
                f"has no effect with algorithm.budget=uniform; leave it at {default}, or set algorithm.budget=knapsack",
            )
        check_finite(self.success_reward, "algorithm.success_reward")
        check(self.success_window > 0, "algorithm.success_window", f"must be positive, not {self.success_window}")
        check(self.overlong_buffer >= 0, "algorithm.overlong_buffer", "must not be negative; 0 is off")
        check_finite(self.overlong_penalty, "algorithm.overlong_penalty")
        check(
            self.overlong_penalty > 0,
            "algorithm.overlong_penalty",
            f"must be positive, not {self.overlong_penalty}; algorithm.overlong_buffer=0 turns the penalty off",
        )
        check(
            self.overlong_buffer > 0 or self.overlong_penalty == 1,
            "algorithm.overlong_penalty",
            f"{self.overlong_penalty:g} has no effect with algorithm.overlong_buffer=0; leave it at 1, or set "
            "algorithm.overlong_buffer",
        )
        check_choice(self.aggregation, AGGREGATIONS, "algorithm.aggregation")
        check_choice(self.objective, ("behaviour", "decoupled"), "algorithm.objective")
        check_choice(self.proximal, ("recompute", "interpolate"), "algorithm.proximal")
        for name in ("minibatches", "epochs"):
            check(getattr(self, name) > 0, f"algorithm.{name}", f"must be positive, not {getattr(self, name)}")
        check_choice(self.correction, CORRECTIONS, "algorithm.correction")
        check_choice(self.correction_level, ("token", "sequence", "geometric"), "algorithm.correction_level")
        check_choice(self.ess_scaling, ("off", "sqrt", "linear"), "algorithm.ess_scaling")
        check_choice(self.kl_estimator, KL_ESTIMATORS, "algorithm.kl_estimator")
        check_choice(self.routing_replay, ("off", "rollout"), "algorithm.routing_replay")
        for name in ("kl_coefficient", "entropy_coefficient", "sequence_length_constant"):
            check_finite(getattr(self, name), f"algorithm.{name}")
        for name in ("balance_coefficient", "router_z_coefficient"):
            value = getattr(self, name)
            check_finite(value, f"algorithm.{name}")
            check(value >= 0, f"algorithm.{name}", f"must not be negative, not {value}")
        check(0 <= self.clip_low <= 1, "algorithm.clip_low", f"must lie in [0, 1], not {self.clip_low}")
        check(self.clip_high >= 0, "algorithm.clip_high", f"must not be negative, not {self.clip_high}")
        check(self.dual_clip == 0 or self.dual_clip > 1, "algorithm.dual_clip", "must be 0 (off) or above 1")
        check(self.correction_cap > 0, "algorithm.correction_cap", "must be positive")
        check(
            0 <= self.correction_floor < self.correction_cap,
            "algorithm.correction_floor",
            f"must lie in [0, algorithm.correction_cap = {self.correction_cap:g}), not {self.correction_floor:g}",
        )
        check(self.kl_coefficient >= 0, "algorithm.kl_coefficient", "must not be negative")
        check(self.sequence_length_constant > 0, "algorithm.sequence_length_constant", "must be positive")

    @property
    def updates(self) -> int:
        """Updates that a batch takes."""
        return self.minibatches * self.epochs

    @property
    def scores_proximal(self) -> bool:
        """True if the policy scores a batch before the first update, as the later updates' proximal policy."""
        return self.objective == "decoupled" and self.proximal == "recompute" and self.updates > 1

    @property
    def scorings(self) -> int:
        """Passes of a step in which the policy only scores its batch."""
        return self.scores_proximal + self.epochs * (self.loss in BATCH_LOSSES)


OPTIMIZERS = {
    "adamw": ("beta1", "beta2", "eps", "weight_decay"),
    "adam": ("beta1", "beta2", "eps"),
    "sgd": (),
    "adafactor": (),
    "muon": ("beta1", "beta2", "eps", "weight_decay"),
    "lion": ("beta1", "beta2", "weight_decay"),
}
"""Optimizers by name, and which of the settings that not all optimizers share each of them reads."""

OPTIMIZER_ARGUMENTS = {
    "sgd": ("momentum", "nesterov"),
    "adafactor": (
        "min_dim_size_to_factor",
        "decay_rate",
        "clipping_threshold",
        "multiply_by_parameter_scale",
        "momentum",
    ),
    "muon": ("momentum", "ns_steps", "consistent_rms"),
}
"""Names in `optimizer.arguments` that a named optimizer takes (libra_jax/training/optimizer.py); others take none."""

SCHEDULES = {
    "constant": (),
    "cosine": ("min_ratio",),
    "linear": ("min_ratio",),
    "wsd": ("min_ratio", "decay_share"),
}
"""Learning-rate schedules by name, and which of the settings that not all schedules share each of them reads."""


@group
@dataclass
class CriticConfig:
    """The critic of PPO: a value model of the policy's shape on the trainer's mesh, for algorithm.advantage=gae.

    The optimizer is that of `optimizer`, with a rate of its own. The trainer holds twice the state.
    """

    enabled: bool = False  # train a critic
    learning_rate: float = 1e-3  # learning rate, constant
    warmup_steps: int = 0  # number of first steps in which the critic learns and the policy stays
    clip: float = 0.2  # largest distance of a value from that of before the step that lowers the loss; 0 is off

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            check_finite(value, f"critic.{name}")
            check(value >= 0, f"critic.{name}", f"must not be negative, not {value}")
        check(self.warmup_steps >= 0, "critic.warmup_steps", f"must not be negative, not {self.warmup_steps}")


@group
@dataclass
class OptimizerConfig:
    """optax optimizer and schedule."""

    # Optimizer: adamw, adam, sgd, adafactor, muon, lion, or a function of your own as "package.module:function". It is
    # called with the optimizer's config and returns an optax.GradientTransformation.
    name: str = "adamw"
    # Further arguments of the optimizer: of your function, or of a named one (docs/guides/optimizers.md), such as
    # {"momentum": 0.9} for sgd.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3  # peak learning rate
    # Learning-rate schedule: constant, cosine and linear (fall to min_ratio at config.steps), wsd (constant, falls
    # linearly in the last steps), or a function of your own as "package.module:function". It is called with the
    # optimizer's config and config.steps, and returns a function from the training step to the learning rate.
    schedule: str = "constant"
    schedule_arguments: Mapping[str, Any] = field(default_factory=dict)  # further arguments of your own schedule
    # Number of first steps in which the learning rate rises linearly from 0. A schedule of your own reads it itself.
    warmup_steps: int = 0
    min_ratio: float = 0.0  # learning rate at the end of cosine, linear and wsd, as a share of the peak
    decay_share: float = 0.2  # share of config.steps, at the end, in which wsd lowers the learning rate
    # Decoupled weight decay (adamw, muon, lion), without norms, biases and the embedding. With an adapter, it applies
    # to the adapter's matrices.
    weight_decay: float = 0.0
    decay_all: bool = False  # weight decay of norms, biases and the embedding, too
    beta1: float = 0.9  # decay of the first moment (adamw, adam, muon's tables and norms); lion: weight of the moment
    beta2: float = 0.99  # decay of the second moment (adamw, adam, muon's tables and norms); lion: decay of the moment
    eps: float = 1e-8  # constant added to the root of the second moment (adamw, adam, muon)
    clip_norm: float = 1.0  # largest global gradient norm; 0 is off
    # Keep the moments in the host's memory between updates. This frees the devices of 8 bytes a parameter (adamw, adam)
    # or of 4 (muon, lion), and makes every update wait for them.
    offload: bool = False

    def __post_init__(self) -> None:
        for name, known in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            if ":" not in (value := getattr(self, name)):
                check_choice(value, (*known, '"package.module:function"'), f"optimizer.{name}")
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
        check(0 <= self.min_ratio <= 1, "optimizer.min_ratio", f"must lie in [0, 1], not {self.min_ratio}")
        check(0 < self.decay_share <= 1, "optimizer.decay_share", f"must lie in (0, 1], not {self.decay_share}")
        check_finite(self.clip_norm, "optimizer.clip_norm")
        check(self.clip_norm >= 0, "optimizer.clip_norm", f"must not be negative (0 is off), not {self.clip_norm}")
        self._check_effects()

    @property
    def moments(self) -> tuple[int, int]:
        """Numbers that the optimizer keeps of each parameter of the layers, and of the embedding and output projection.

        A function of the user's own counts as Adam. Adafactor's row and column means count as nothing.
        """
        momentum = 1 if self.arguments.get("momentum") else 0
        return {
            "sgd": (momentum, momentum),
            "adafactor": (momentum, momentum),
            "lion": (1, 1),
            "muon": (1, 2),
        }.get(self.name, (2, 2))

    def _check_effects(self) -> None:
        """Refuses settings that the optimizer or the schedule does not read."""
        for name in self.arguments if ":" not in self.name else ():
            takes = OPTIMIZER_ARGUMENTS.get(self.name, ())
            near = difflib.get_close_matches(name, takes, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(takes) or 'none'}"
            check(name in takes, "optimizer.arguments", f"optimizer.name={self.name} takes no {name!r}; {hint}")
        for partner, known in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            chosen = getattr(self, partner)
            for name in sorted({name for read in known.values() for name in read}):
                default, readers = getattr(type(self), name), [key for key, read in known.items() if name in read]
                check(
                    ":" in chosen or chosen in readers or getattr(self, name) == default,
                    f"optimizer.{name}",
                    f"has no effect with optimizer.{partner}={chosen}; leave it at {default:g}, or set "
                    f"optimizer.{partner} to {' or '.join(readers)}",
                )
        check(
            not self.decay_all or self.weight_decay > 0,
            "optimizer.decay_all",
            "has no effect with optimizer.weight_decay=0; leave it at False, or set optimizer.weight_decay",
        )
        check(
            not self.schedule_arguments or ":" in self.schedule,
            "optimizer.schedule_arguments",
            f"optimizer.schedule={self.schedule} takes none; leave it empty, or name a function of your own there",
        )
        check(
            not self.offload or self.name != "sgd" or bool(self.arguments.get("momentum")),
            "optimizer.offload",
            "has no effect with optimizer.name=sgd, which keeps no moments; leave it at False, or set "
            'optimizer.arguments={"momentum": 0.9}',
        )


@group
@dataclass
class TrainerConfig:
    """The trainer's mesh and the shapes it compiles for."""

    # JAX platform: auto (what JAX finds, at most one GPU), cpu (as many virtual devices as the mesh has), cuda, tpu.
    platform: str = "auto"
    processes: int = 1  # number of trainer processes, with equal shares of the mesh; above 1 with cluster.backend=ray
    data: int = 1  # number of data-parallel replicas
    fsdp: int = 1  # number of shards of parameters and optimizer
    tensor: int = 1  # number of shards of a layer's matrices
    # Number of parts that the tokens of a row are split into (context parallelism), for rows too long for one device.
    # The state is split over fsdp x context. Row lengths must divide by context x tensor. Fastest if it divides the
    # query heads of a tensor shard.
    context: int = 1
    row_tokens: int = 512  # tokens of a packed row; a longer trajectory gets a longer row from row_buckets
    # Further row lengths in tokens, ascending, all above row_tokens. Their programs compile in the background from the
    # trainer's start on.
    row_buckets: tuple[int, ...] = ()
    rows_per_micro_batch: int = 8  # rows in a micro-batch, over all data and fsdp shards
    # Dtype of the sums of gradients over micro-batches: float32, or bfloat16, which takes 2 bytes a parameter less and
    # rounds every sum.
    accumulation_dtype: str = "float32"
    pack: bool = True  # several trajectories in a row, separated by segment ids
    cores: tuple[int, ...] = ()  # CPU cores to which the trainer's threads are pinned; empty: not pinned
    # Share of each GPU's memory that JAX reserves at its start (CUDA). The rest is for CUDA's context, NCCL and the
    # buffers of weight sync. Lower it if another program uses the trainer's GPUs. XLA_CLIENT_MEM_FRACTION in the
    # environment wins. Hybrid workers reserve nothing, because an engine shares their GPUs.
    memory_fraction: float = 0.9
    # Directory in which JAX keeps compiled programs for the next start, at most 16 GiB: auto (libra_jax/programs in
    # XDG_CACHE_HOME or ~/.cache on GPUs and TPUs, off on CPU), off, or a path. JAX_COMPILATION_CACHE_DIR wins. Its
    # files are code: nobody else may write there.
    compilation_cache: str = "auto"
    # Peak FLOP/s of a device, for train/mfu. 0: that of its hardware sheet (libra_jax/planning/hardware.py). A device
    # without a sheet, such as a CPU, then has no train/mfu.
    peak_flops: float = 0.0
    max_skipped_steps: int = 10  # non-finite steps in a row after which the run stops
    # Times that a lost trainer is restarted from the last checkpoint. Groups trained since that checkpoint stay in
    # memory (about 0.1 kB a token, and with routing replay the bytes of its experts: docs/guides/experts.md) and are
    # trained again. With 0, or checkpoint.every=0, its loss ends the run. So it does if checkpoints have failed for
    # more than 4 times checkpoint.every steps: no more groups are kept.
    restarts: int = 3

    def __post_init__(self) -> None:
        check_choice(self.accumulation_dtype, ("float32", "bfloat16"), "trainer.accumulation_dtype")
        check_choice(self.platform, ("auto", "cpu", "cuda", "tpu"), "trainer.platform")
        for name in ("processes", "data", "fsdp", "tensor", "context", "row_tokens", "rows_per_micro_batch"):
            check(getattr(self, name) > 0, f"trainer.{name}", f"must be positive, not {getattr(self, name)}")
        check(
            self.devices % self.processes == 0,
            "trainer.processes",
            f"the mesh's {self.devices} devices do not divide over {self.processes} processes; use "
            f"{divisors(self.devices, self.processes)}",
        )
        check(self.restarts >= 0, "trainer.restarts", f"must not be negative, not {self.restarts}")
        fraction = self.memory_fraction
        check(0 < fraction <= 1, "trainer.memory_fraction", f"must lie in (0, 1], not {fraction}")
        check(bool(self.compilation_cache), "trainer.compilation_cache", "must be auto, off or a path")
        check_finite(self.peak_flops, "trainer.peak_flops")
        check(self.peak_flops >= 0, "trainer.peak_flops", f"must not be negative, not {self.peak_flops}")
        lengths = (self.row_tokens, *self.row_buckets)
        check(list(lengths) == sorted(set(lengths)), "trainer.row_buckets", "must ascend and exceed row_tokens")
        parts, named = self.context * self.tensor, f"tensor = {self.tensor}"
        if self.context > 1:
            named = f"context x tensor = {self.context} x {self.tensor}"
        # Of twice context, too: if context does not divide the model's heads, a device takes two parts of a row.
        fitting = math.lcm(parts, 2 * self.context) if self.context > 1 else parts
        for length in lengths:
            name = "row_tokens" if length == self.row_tokens else "row_buckets"
            other = ""
            if self.context > 1 and length % (2 * self.tensor) == 0:
                other = f", or a trainer.context of {divisors(length // (2 * self.tensor), self.context)}"
            check(
                length % parts == 0,
                f"trainer.{name}",
                f"{length} does not divide over {named}; use {-(-length // fitting) * fitting}, the next multiple of "
                f"{fitting}{other}",
            )
        shards = self.data * self.fsdp
        check(
            self.rows_per_micro_batch % shards == 0,
            "trainer.rows_per_micro_batch",
            f"{self.rows_per_micro_batch} does not divide over data x fsdp = {shards} shards; use "
            f"{multiples(shards, self.rows_per_micro_batch)}, or a data x fsdp of "
            f"{divisors(self.rows_per_micro_batch, shards)}",
        )

    @property
    def replica_devices(self) -> int:
        """Devices of one data-parallel replica."""
        return self.fsdp * self.tensor * self.context

    @property
    def devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.replica_devices


@group
@dataclass
class WarmStartConfig:
    """Supervised steps on the environment's demonstrations before reinforcement learning begins."""

    steps: int = 0  # most supervised steps
    batch_size: int = 64  # demonstrations of a step
    learning_rate: float = 3e-3  # constant learning rate of the supervised steps
    target_loss: float = 0.0  # mean token loss at which the warm start ends early; 0 is off
    # Arguments of task.source for demonstrations, in place of those in task.arguments: shorter or easier tasks.
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self.steps >= 0, "warm_start.steps", "must not be negative")
        check(self.batch_size > 0, "warm_start.batch_size", "must be positive")
        check_finite(self.learning_rate, "warm_start.learning_rate")
        check(self.learning_rate >= 0, "warm_start.learning_rate", f"must not be negative, not {self.learning_rate}")
        check(self.target_loss >= 0, "warm_start.target_loss", f"must not be negative, not {self.target_loss}")
