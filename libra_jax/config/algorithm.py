"""Settings of the objective: advantage, loss, corrections, budgets, and the critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax.config.arguments import check_arguments
from libra_jax.config.checks import check
from libra_jax.config.fields import field
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
REWARD_ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Advantages that are one number a rollout, computed from the rewards of its group alone."""
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
CLIPPED_LOSSES = ("clipped", "gspo", "cispo", "gmpo", "bapo", "clip_cov")
"""Losses that read algorithm.clip_low and clip_high."""
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
FILTERS = ("none", "zero_variance")
BUDGETS = ("uniform", "knapsack")
REPLAYS = ("none", "success")
CORRECTIONS = ("none", "truncated", "masked")
LEVELS = ("token", "sequence", "geometric")
KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


@dataclass
@group("algorithm")
class AlgorithmConfig:
    """The objective. Functions and references: libra_jax/algorithms."""

    # Advantage estimator: grpo, dr_grpo, rloo, opo, reinforce_plus_plus_baseline (all compare a group),
    # reinforce_plus_plus, distillation (needs teacher), gae and egae (T-PPO's, also of cut-off rollouts; both need
    # critic.enabled), or "package.module:function" (see docs/guides/own_loss.md).
    advantage: str = field("grpo", choices=ADVANTAGES, own_function=True)
    # Keyword arguments of the advantage: reward_weight of distillation; discount, turn_discount, trace_decay and
    # whitened of gae and egae; length_scale, ignored_tokens and bound of egae; or those of your function.
    advantage_arguments: Mapping[str, Any] = field(default_factory=dict)
    # What grpo, dr_grpo and reinforce_plus_plus_baseline subtract from a reward: mean (of the group), leave_one_out (of
    # the others), length (mean weighted by length), minimum_variance (VCPO's mean weighted by squared gradients, at
    # the price of a further backward pass), or "package.module:function" (see docs/guides/own_loss.md). The advantages
    # rloo and opo are dr_grpo with leave_one_out and length.
    baseline: str = field("mean", choices=BASELINES, own_function=True)
    # Keyword arguments of the baseline: weighted, cap and by_length of minimum_variance, or those of your function.
    baseline_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Policy loss: clipped (PPO's), gspo (ratio of a sequence), cispo (clipped importance weight), sapo (soft gate),
    # gmpo (geometric mean), bapo (adaptive bounds), clip_cov, kl_cov (covariance of advantage and log-probability), or
    # "package.module:function" (see docs/guides/own_loss.md).
    loss: str = field("clipped", choices=LOSSES, own_function=True)
    # Keyword arguments of the loss (libra_jax/algorithms/losses.py and batch_statistics.py), or those of your function.
    loss_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Distance below 1 at which the ratio is clipped.
    clip_low: float = field(0.2, ge=0, le=1, needs=("loss", *CLIPPED_LOSSES))
    # Distance above 1 at which the ratio is clipped; DAPO uses 0.28.
    clip_high: float = field(0.2, ge=0, infinite=True, needs=("loss", *CLIPPED_LOSSES))
    # Clipped loss: lower bound factor for negative advantages; 0 is off (else above 1).
    dual_clip: float = field(0.0, ge=0, needs=("loss", "clipped", "gspo", "bapo", "clip_cov"))
    # Mean of token losses: token_mean, sequence_mean, sequence_sum (see sequence_length_constant). A rollout of several
    # segments is one sequence; token_mean counts its tokens (docs/concepts/segments.md).
    aggregation: str = field("token_mean", choices=AGGREGATIONS)
    sequence_length_constant: float = field(1.0, gt=0, needs=("aggregation", "sequence_sum"))  # divisor of sequence_sum
    # Denominator of the ratio: behaviour (the sampling policy) or decoupled (the proximal policy, at the step's start).
    # With one update a batch the decoupled ratio is 1 and no clip binds. Its gradient is that of -weight * advantage *
    # log-probability, with the weight of `correction`; changed clips are refused.
    objective: str = field("behaviour", choices=("behaviour", "decoupled"))
    # Source of the decoupled objective's proximal policy: recompute (the policy before the batch's first update, one
    # more forward pass with several updates), interpolate (between the behaviour and the current policy, by staleness:
    # A-3PO).
    proximal: str = field("recompute", choices=("recompute", "interpolate"), needs=("objective", "decoupled"))
    minibatches: int = field(1, gt=0)  # parts of a batch, of whole groups; each takes an update of its own
    epochs: int = field(1, gt=0)  # passes over a batch's mini-batches
    # Importance sampling of the proximal over the behaviour policy: none, truncated, masked.
    correction: str = field("none", choices=CORRECTIONS)
    # Largest importance weight: larger ones are cut to it (truncated), or their tokens dropped (masked).
    correction_cap: float = field(2.0, gt=0, infinite=True, needs=("correction", "truncated", "masked"))
    # Smallest importance weight; masked drops the tokens of smaller ones, too.
    correction_floor: float = field(0.0, ge=0, needs=("correction", "masked"))
    # Ratio that the correction looks at: token (its own), sequence (product over its trajectory), geometric (geometric
    # mean over its trajectory).
    correction_level: str = field("token", choices=LEVELS, needs=("correction", "truncated", "masked"))
    # Scale of the learning rate by the effective sample size, a share of the trajectories: off, sqrt (for Adam and its
    # relatives), linear (for sgd).
    ess_scaling: str = field("off", choices=("off", "sqrt", "linear"))
    # Weight of the KL term; above 0 a frozen reference model lives on the trainer's mesh.
    kl_coefficient: float = field(0.0, ge=0)
    # Reference model of the KL term, such as a larger teacher with the policy's vocabulary: a Hugging Face directory
    # (frozen on the trainer's mesh), or the URL of a vLLM server, http://host:port/v1. Empty: the initial policy.
    teacher: str = field("", needs=("kl_coefficient",))
    # Arguments of a teacher behind a URL: model (its name there, needed if the server has several), api_key_env,
    # seconds (of one try of a request), retries, concurrency (most requests at once).
    teacher_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Estimator of the KL: k1, k2, k3; k1+ and k3+ have the value of k1 and k3 and the gradient of k2.
    kl_estimator: str = field("k3", choices=KL_ESTIMATORS)
    kl_in_reward: bool = False  # KL subtracted from each token's reward, instead of added to the loss
    entropy_coefficient: float = 0.0  # weight of the entropy that the loss rewards
    # Weight of the load-balance loss of a mixture's routers (`router/balance`).
    balance_coefficient: float = field(0.0, ge=0)
    router_z_coefficient: float = field(0.0, ge=0)  # weight of the z-loss of a mixture's routers (`router/z`)
    # Experts of a mixture's tokens in training: off (the trainer's own), rollout (those that the engine chose: routing
    # replay, which keeps the ratio of engine and trainer near 1).
    routing_replay: str = field("off", choices=("off", "rollout"))
    # Finished groups that are replaced by others (counted, capped by coordinator.max_replacements): none, zero_variance
    # (all rollouts have the same reward of the environment; with reward.environment_weight=0, of the functions), or
    # "package.module:function". Your function(group, **filter_arguments) returns a reason, or None to keep the group.
    filter: str = field("none", choices=FILTERS, own_function=True)
    # Keyword arguments of your filter; the built-in filters take none.
    filter_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Tokens before a rollout's limit over which its reward falls by overlong_penalty (DAPO, arXiv 2503.14476). 0 is
    # off. The limit is task.max_tokens, or without it rollout.max_tokens x task.max_turns. Only training rewards fall:
    # algorithm.filter, reward/environment and evaluations see them without the penalty.
    overlong_buffer: int = field(0, ge=0)
    # Reward that a rollout at its token limit loses.
    overlong_penalty: float = field(1.0, gt=0, needs=("overlong_buffer",))
    # Rollouts of each prompt, coordinator.group_size on average over groups_per_step prompts: uniform (all equal),
    # knapsack (most where past success rates promise most: arXiv 2509.25849; group_size for prompts without past
    # rollouts), or "package.module:function" (see docs/guides/prompts.md).
    budget: str = field("uniform", choices=BUDGETS, own_function=True)
    budget_arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of your budget
    # Fewest rollouts of a prompt, unless the budget is uniform.
    budget_least: int = field(2, gt=0, needs=("budget", "knapsack"))
    # Most rollouts of a prompt, unless the budget is uniform; 0: 4 x coordinator.group_size.
    budget_most: int = field(0, ge=0, needs=("budget", "knapsack"))
    # Stored rollouts that are trained again: none, success (a group in which no rollout succeeds gets a success that an
    # earlier group of its prompt had, as one more trajectory; DART, arXiv 2509.23866). A replayed one counts as no
    # rollout in metrics, success rates and scheduling.
    replay: str = field("none", choices=REPLAYS)
    # Most stored successes of a prompt, the newest.
    replay_per_prompt: int = field(1, gt=0, needs=("replay", "success"))
    # Most stored tokens, about 35 bytes each, also in every checkpoint.
    replay_tokens: int = field(1_000_000, gt=0, needs=("replay", "success"))
    # Most training steps between the oldest token of a replayed rollout and the step that trains it.
    replay_max_staleness: int = field(16, gt=0, needs=("replay", "success"))
    # Share of the turns of a group that are trained, those of the highest entropy (DART takes 0.8). The entropy of a
    # turn is estimated by the mean of -log-probability of its tokens when they were sampled.
    entropy_share: float = field(1.0, gt=0, le=1)
    # Reward, without shaping, from which on a rollout is a success. Read by algorithm.budget, algorithm.replay and
    # task.order.
    success_reward: float = 1.0
    # Rollouts of a prompt that its success rate remembers: each further one takes 1/success_window off the weight of
    # those before.
    success_window: int = field(32, gt=0)

    def __post_init__(self) -> None:
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
        for kind in ("advantage", "baseline", "loss", "filter", "budget"):
            name = f"{kind}_arguments"
            check_arguments(getattr(self, kind), getattr(self, name), f"algorithm.{name}")
        check(
            self.budget_most == 0 or self.budget_most >= self.budget_least,
            "algorithm.budget_most",
            f"must be 0 (4 x coordinator.group_size) or at least budget_least = {self.budget_least}, not "
            f"{self.budget_most}",
        )
        check(self.dual_clip == 0 or self.dual_clip > 1, "algorithm.dual_clip", "must be 0 (off) or above 1")
        check(
            self.correction_floor < self.correction_cap,
            "algorithm.correction_floor",
            f"{self.correction_floor:g} must be below algorithm.correction_cap = {self.correction_cap:g}",
        )

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
    def compares_only_rewards(self) -> bool:
        """True if a rollout's advantage is one number, computed from the rewards of its group alone."""
        return (
            self.advantage in REWARD_ADVANTAGES
            and self.baseline in ("mean", "leave_one_out")
            and not (self.kl_in_reward and self.kl_coefficient)
        )

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

    enabled: bool = field(False, needs=("algorithm.advantage", *CRITIC_ADVANTAGES))  # train a critic
    learning_rate: float = field(1e-3, ge=0)  # learning rate, constant
    warmup_steps: int = field(0, ge=0)  # number of first steps in which the critic learns and the policy stays
    # Largest distance of a value from that of before the step that lowers the loss; 0 is off.
    clip: float = field(0.2, ge=0)
