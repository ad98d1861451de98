"""Settings of the objective: advantage, loss, corrections, budgets, and the critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax.config.arguments import check_arguments
from libra_jax.config.checks import check, check_choice, check_finite, check_function
from libra_jax.config.group import group

ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "distillation",
    "gae",
    "egae",
)
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
"""Advantages that compare the rewards of a group."""
WHITENED_ADVANTAGES = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages that are divided by the standard deviation of the whole batch's."""
BASELINES = ("mean", "leave_one_out", "length", "minimum_variance")
BASELINE_ADVANTAGES = ("grpo", "dr_grpo", "reinforce_plus_plus_baseline")
"""Advantages whose formula has the mean of a group, which `algorithm.baseline` replaces."""
CRITIC_ADVANTAGES = ("gae", "egae")
"""Advantages that read the values of a critic."""
LOSSES = ("clipped", "gspo", "cispo", "sapo", "gmpo", "bapo", "clip_cov", "kl_cov")
TOKEN_LOSSES = ("clipped", "cispo", "sapo", "bapo", "clip_cov", "kl_cov")
"""Losses of single tokens, which need no other token of the sequence."""
BATCH_LOSSES = ("bapo", "clip_cov", "kl_cov")
"""Losses that take statistics of all tokens of an update: the policy scores them before the update."""
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
FILTERS = ("none", "zero_variance")
BUDGETS = ("uniform", "knapsack")
REPLAYS = ("none", "success")
CORRECTIONS = ("none", "truncated", "masked")
KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


@dataclass
@group("algorithm")
class AlgorithmConfig:
    """The objective. Functions and references: libra_jax/algorithms."""

    # Advantage estimator: grpo, dr_grpo, rloo, opo, reinforce_plus_plus_baseline (all compare a group),
    # reinforce_plus_plus, distillation (needs teacher), gae and egae (T-PPO's, also of cut-off rollouts; both need
    # critic.enabled), or "package.module:function" (see docs/guides/own_loss.md).
    advantage: str = "grpo"
    # Keyword arguments of the advantage: reward_weight of distillation; discount, turn_discount, trace_decay and
    # whitened of gae and egae; length_scale, ignored_tokens and bound of egae; or those of your function.
    advantage_arguments: Mapping[str, Any] = field(default_factory=dict)
    # What grpo, dr_grpo and reinforce_plus_plus_baseline subtract from a reward: mean (of the group), leave_one_out (of
    # the others), length (mean weighted by length), minimum_variance (VCPO's mean weighted by squared gradients, at
    # the price of a further backward pass), or "package.module:function" (see docs/guides/own_loss.md). The advantages
    # rloo and opo are dr_grpo with leave_one_out and length.
    baseline: str = "mean"
    # Keyword arguments of the baseline: weighted, cap and by_length of minimum_variance, or those of your function.
    baseline_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Policy loss: clipped (PPO's), gspo (ratio of a sequence), cispo (clipped importance weight), sapo (soft gate),
    # gmpo (geometric mean), bapo (adaptive bounds), clip_cov, kl_cov (covariance of advantage and log-probability), or
    # "package.module:function" (see docs/guides/own_loss.md).
    loss: str = "clipped"
    # Keyword arguments of the loss (libra_jax/algorithms/losses.py and batch_statistics.py), or those of your function.
    loss_arguments: Mapping[str, Any] = field(default_factory=dict)
    clip_low: float = 0.2  # distance below 1 at which the ratio is clipped
    clip_high: float = 0.2  # distance above 1 at which the ratio is clipped; DAPO uses 0.28
    dual_clip: float = 0.0  # clipped loss: lower bound factor for negative advantages; 0 is off (else above 1)
    # Mean of token losses: token_mean, sequence_mean, sequence_sum (see sequence_length_constant). A rollout of several
    # segments is one sequence; token_mean counts its tokens (docs/concepts/segments.md).
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
    # Reference model of the KL term, such as a larger teacher with the policy's vocabulary: a Hugging Face directory
    # (frozen on the trainer's mesh), or the URL of a vLLM server, http://host:port/v1. Empty: the initial policy.
    teacher: str = ""
    # Arguments of a teacher behind a URL: model (its name there, needed if the server has several), api_key_env,
    # seconds (of one try of a request), retries, concurrency (most requests at once).
    teacher_arguments: Mapping[str, Any] = field(default_factory=dict)
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
    # Stored rollouts that are trained again: none, success (a group in which no rollout succeeds gets a success that an
    # earlier group of its prompt had, as one more trajectory; DART, arXiv 2509.23866). A replayed one counts as no
    # rollout in metrics, success rates and scheduling.
    replay: str = "none"
    replay_per_prompt: int = 1  # most stored successes of a prompt, the newest
    replay_tokens: int = 1_000_000  # most stored tokens, about 35 bytes each, also in every checkpoint
    # Most training steps between the oldest token of a replayed rollout and the step that trains it.
    replay_max_staleness: int = 16
    # Share of the turns of a group that are trained, those of the highest entropy (DART takes 0.8). The entropy of a
    # turn is estimated by the mean of -log-probability of its tokens when they were sampled.
    entropy_share: float = 1.0
    # Reward, without shaping, from which on a rollout is a success. Read by algorithm.budget, algorithm.replay and
    # task.order.
    success_reward: float = 1.0
    # Rollouts of a prompt that its success rate remembers: each further one takes 1/success_window off the weight of
    # those before.
    success_window: int = 32

    def __post_init__(self) -> None:
        check_function(self.advantage, ADVANTAGES, self.advantage_arguments, "algorithm.advantage")
        check_function(self.baseline, BASELINES, self.baseline_arguments, "algorithm.baseline")
        check(
            self.baseline == "mean" or self.advantage in BASELINE_ADVANTAGES,
            "algorithm.baseline",
            f"{self.baseline} has no effect with algorithm.advantage={self.advantage}, which has its own or compares "
            f"no group; leave it at mean, or set algorithm.advantage to one of {', '.join(BASELINE_ADVANTAGES)}",
        )
        known = {"leave_one_out": "rloo", "length": "opo"}.get(self.baseline, "")
        check(
            not known or self.advantage != "dr_grpo",
            "algorithm.baseline",
            f"dr_grpo with {self.baseline} is algorithm.advantage={known}; set that, and leave the baseline at mean",
        )
        check(
            ":" in self.baseline or self.baseline == "minimum_variance" or not self.baseline_arguments,
            "algorithm.baseline_arguments",
            f"algorithm.baseline={self.baseline} takes none; leave it empty, or name a function of your own there",
        )
        check_function(self.loss, LOSSES, self.loss_arguments, "algorithm.loss")
        for kind in ("advantage", "baseline", "loss"):
            field_name = f"algorithm.{kind}_arguments"
            check_arguments(getattr(self, kind), getattr(self, f"{kind}_arguments"), field_name)
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
        check_choice(self.replay, REPLAYS, "algorithm.replay")
        for name, default in (("replay_per_prompt", 1), ("replay_tokens", 1_000_000), ("replay_max_staleness", 16)):
            value = getattr(self, name)
            check(value > 0, f"algorithm.{name}", f"must be positive, not {value}")
            check(
                self.replay != "none" or value == default,
                f"algorithm.{name}",
                f"has no effect with algorithm.replay=none; leave it at {default}, or set algorithm.replay=success",
            )
        check(
            0 < self.entropy_share <= 1,
            "algorithm.entropy_share",
            f"must lie in (0, 1], not {self.entropy_share:g}; 1 trains all turns",
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

    def check_replay(self, max_staleness: int) -> None:
        """Refuses replays that nothing compares or corrects, or that are always too old.

        Args:
          max_staleness: `coordinator.max_staleness`.
        """
        if self.replay == "none":
            return
        check(
            self.advantage not in ("distillation", *CRITIC_ADVANTAGES),
            "algorithm.replay",
            f"a success helps rewards that are compared, and algorithm.advantage={self.advantage} compares none; set "
            "it to none, or take grpo",
        )
        check(
            self.objective == "behaviour" or self.correction != "none",
            "algorithm.replay",
            "an older policy sampled what is replayed, and algorithm.correction=none ignores that with "
            "algorithm.objective=decoupled; set algorithm.correction=truncated or masked",
        )
        check(
            self.routing_replay == "off",
            "algorithm.replay",
            "a stored rollout has no experts for algorithm.routing_replay=rollout; set either to its default",
        )
        check(
            self.replay_max_staleness > max_staleness,
            "algorithm.replay_max_staleness",
            f"{self.replay_max_staleness} must be above coordinator.max_staleness = {max_staleness}: a group takes "
            "successes of groups that have been trained for sure",
        )

    @property
    def teacher_served(self) -> bool:
        """True if the teacher answers behind a URL."""
        return self.teacher.startswith(("http://", "https://"))

    @property
    def teacher_directory(self) -> str:
        """Directory of a teacher on the trainer's mesh; empty without one."""
        return "" if self.teacher_served else self.teacher

    @property
    def scores_reference(self) -> bool:
        """True if the trainer scores each batch with a reference model of its own."""
        return self.kl_coefficient > 0 and not self.teacher_served

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
        """Passes of a step in which the policy only scores its batch; a backward pass counts as two of them."""
        further = 3 * (self.baseline == "minimum_variance")
        return self.scores_proximal + self.epochs * (self.loss in BATCH_LOSSES) + further


@dataclass
@group("critic")
class CriticConfig:
    """The critic of PPO and T-PPO: a value model of the policy's shape on the trainer's mesh, for gae and egae.

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
