"""A training step's numbers: the registry of their names, and `metrics.jsonl`.

`METRICS` has all names that a run writes to `metrics.jsonl`, TensorBoard, Weights & Biases and `/metrics`, with unit
and meaning. The documentation's page of metrics is generated from it. A `strict` recorder refuses any other name; all
recorders in the tests are strict. Numbers of a user's environment and reward functions have their own names under
`agent/` and `reward/`.

`metrics.jsonl` has one JSON object per training step, `{"step": 3, "reward/mean": 0.5, ...}`. It is strict JSON: a
number that is not finite is written as null and named under `nonfinite`, for example
`{"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}`. TensorBoard gets the same scalars, including the not-finite
ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra_jax.telemetry import files

METRICS_FILE = "metrics.jsonl"

STRICT_VARIABLE = "LIBRA_JAX_STRICT_METRICS"
"""Environment variable that makes recorders strict if it is not empty. Processes that tests start inherit it."""

METRIC = "<metric>"
"""Placeholder for another registered name."""

INDEX = "<index>"
"""Placeholder for a whole number."""


@dataclass(frozen=True)
class Metric:
    """A number of a training step.

    Attributes:
      name: Name in `metrics.jsonl`. `<...>` stands for any text, `<index>` for a whole number, and `<metric>` for
        another registered name.
      unit: Unit of the number. "share" is from 0 to 1.
      meaning: Meaning of the number, as a noun phrase.
      source: Part of Libra-JAX that emits the number.
    """

    name: str
    unit: str
    meaning: str
    source: str


def find(name: str) -> Metric | None:
    """Returns the metric that has this name, or whose pattern the name fits. None if the name is not registered."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    for metric, pattern in _PATTERNS:
        match = pattern.fullmatch(name)
        # What stands for `<metric>` has to be registered itself.
        if match is not None and (not metric.name.endswith(METRIC) or find(match[match.re.groups]) is not None):
            return metric
    return None


def check(names: Iterable[str]) -> None:
    """Refuses names that are not registered.

    Raises:
      ValueError: A name is not in `METRICS`.
    """
    for name in names:
        if find(name) is None:
            raise ValueError(f"{name!r} is no metric of {__name__}: add a row with its unit and meaning there.")


def _table(source: str, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name, unit, meaning, source) for name, unit, meaning in rows)


_STEP = _table(
    "coordinator",
    ("policy_version", "version", "version of the weights that the step made; evaluations use these weights"),
    ("step/seconds", "seconds", "time from the end of the step before, an evaluation after this step included"),
    ("rollout/seconds", "seconds", "time in which at least one group ran"),
    ("rollout/wait_seconds", "seconds", "time in which training waited for its batch"),
    ("train/seconds", "seconds", "time of the trainer's step"),
    ("train/tokens_per_second", "tokens/second", "`tokens/processed` over `train/seconds`"),
    ("train/tokens_per_second_per_device", "tokens/second", "the same for each of `train/devices`"),
    (
        "train/mfu",
        "share",
        "model FLOPs utilisation: `train/flops` over `train/seconds` and the peak of `train/devices`; without a "
        "known peak (`trainer.peak_flops`) it is left out",
    ),
    ("sync/seconds", "seconds", "time of the weight sync to all engines"),
    ("sync/bytes", "bytes", "bytes that each engine loaded in the weight sync"),
    ("sync/paused_seconds", "seconds", "time for which an engine stopped in the weight sync, a mean"),
    ("sync/sent_bytes", "bytes", "bytes that weight relays sent to all other hosts in the weight sync"),
    ("sync/sent_share", "share", "these of the bytes of the chunks that they brought (`rollout.full_sync_every`)"),
    ("checkpoint/seconds", "seconds", "time spent in checkpoints since the step before"),
    ("coordinator/seconds_per_request", "seconds", "coordinator's own time for a request, a mean"),
    ("tokens_per_second", "tokens/second", "tokens generated for training since the step before, over `step/seconds`"),
    (
        "rollout/tokens_per_second_per_device",
        "tokens/second",
        "`tokens_per_second` for each device of the serving engines",
    ),
    ("tokens/generated", "tokens", "tokens generated for training since the step before"),
    ("tokens/trained", "tokens", "generated tokens of the batch that are not masked"),
    ("tokens/mean", "tokens", "generated tokens of a rollout, mean over the batch"),
    ("tokens/replaced", "tokens", "generated tokens of groups that were replaced"),
    ("turns/mean", "turns", "turns of a rollout, mean over the batch"),
    ("segments/mean", "segments", "token sequences of a rollout that share a prefix at most, mean over the batch"),
    ("staleness/mean", "versions", "versions between a group's first dispatch and its training step, mean"),
    ("staleness/max", "versions", "the same of the oldest group"),
    ("rollout/masked", "share", "rollouts of the batch that the trainer masks because a limit cut them off"),
    ("rollout/resumed", "count", "generations that failed and went on from their retained tokens"),
    ("groups/rollouts_least", "rollouts", "rollouts of the smallest group of the batch (`algorithm.budget`)"),
    ("groups/rollouts_most", "rollouts", "rollouts of the largest group of the batch"),
    ("replay/rollouts", "rollouts", "stored successes that the batch trains again (`algorithm.replay`)"),
    ("replay/groups", "share", "groups of the batch that have one"),
    ("replay/tokens", "tokens", "generated tokens of them, in no other metric of tokens"),
    ("replay/staleness_max", "versions", "versions between their oldest token and the training step"),
    ("replay/stored", "rollouts", "successes that are stored"),
    ("replay/stored_tokens", "tokens", "tokens of them"),
    ("groups/begun", "groups", "groups that the trainer began on before the batch was complete (`trainer.stream`)"),
    ("groups/older", "groups", "groups begun under an older version; with `coordinator.recycle`, those left over"),
    ("groups/replaced", "groups", "groups that were replaced instead of trained"),
    (
        "groups/replaced_<reason>",
        "groups",
        "those of one reason: environment, reward, teacher, task, zero_variance, filter (your own), redundant",
    ),
    ("voids/rollouts", "rollouts", "rollouts that a crash of their environment voided"),
    ("voids/most_of_a_prompt", "rollouts", "most of them that one prompt had"),
    ("finish/<reason>", "share", "rollouts that ended so: answered, length, max_turns, max_tokens, ..."),
)

_ROUTING = _table(
    "dispatcher",
    ("routing/moves", "requests", "requests that went on on another engine"),
    ("routing/moved_tokens", "tokens", "tokens of context of the requests that moved"),
    ("routing/judged", "rollouts", "finished rollouts with a routing decision after their first tool return"),
    ("routing/one_shot_accuracy", "share", "judged rollouts whose decision named the bucket of their true length"),
    ("routing/move_seconds", "seconds", "wait for the first token after a move, mean; prefill of the context included"),
    ("routing/stay_seconds", "seconds", "wait for the first token without a move, mean"),
)

_TRAINER = _table(
    "trainer",
    ("loss", "1", "loss of the step"),
    ("loss/policy", "1", "policy's part of the loss"),
    ("loss/kl", "1", "KL penalty's part of the loss"),
    ("loss/entropy", "1", "entropy bonus's part of the loss"),
    ("grad_norm", "1", "norm of the gradient before clipping"),
    ("skipped", "share", "updates of the step that moved nothing: a number was not finite, or no token was trained"),
    (f"update/{INDEX}/{METRIC}", "", "the same of one update, from 1, if a batch takes several"),
    ("learning_rate", "1", "learning rate of the step, mean over its updates"),
    ("ess", "share", "effective sample size over the trajectories, by the products of their tokens' ratios (Kish)"),
    ("entropy", "nats/token", "entropy of the policy, mean over trained tokens"),
    ("kl/reference", "nats/token", "KL to the reference policy"),
    ("kl/behaviour", "nats/token", "KL to the policy that sampled, over all trained tokens"),
    ("clip/low_fraction", "share", "trained tokens whose ratio is clipped from below"),
    ("clip/high_fraction", "share", "trained tokens whose ratio is clipped from above"),
    ("clip/dual_fraction", "share", "trained tokens on which dual clipping acts"),
    ("ratio/max", "1", "largest importance ratio of a trained token"),
    ("correction/weight", "1", "off-policy correction's weight, mean over trained tokens"),
    ("correction/weight_squared", "1", "its square, mean over trained tokens"),
    ("correction/capped_fraction", "share", "trained tokens whose ratio is above the correction's cap"),
    ("router/balance", "1", "load-balance loss of a mixture's routers; 1 if tokens spread evenly over experts"),
    ("router/replayed", "share", "trained tokens that took the engine's experts (routing replay)"),
    ("router/z", "1", "z-loss of a mixture's routers: square of the log of the sum of exponentiated logits"),
    ("mismatch/kl", "nats/token", "KL between engine and trainer over tokens of the scoring version"),
    ("mismatch/ratio_max", "1", "largest ratio between trainer and engine over tokens of the scoring version"),
    ("mismatch/moved_kl", "nats/token", "`mismatch/kl` of rollouts that several engines served"),
    ("mismatch/moved_log_prob_max", "nats", "largest difference of log-probabilities in those rollouts"),
    ("offpolicy/kl", "nats/token", "KL over the tokens that older versions sampled"),
    ("advantage/mean", "1", "advantage, mean over trained tokens"),
    ("advantage/std", "1", "standard deviation of the advantage"),
    ("advantage/min", "1", "smallest advantage"),
    ("advantage/max", "1", "largest advantage"),
    ("groups/without_gradient", "share", "groups whose trained tokens have no advantage"),
    ("turns/trained_share", "share", "turns of trained rollouts that are in the loss (`algorithm.entropy_share`)"),
    ("tokens/entropy_share", "share", "tokens of those turns, of all tokens that could be in the loss"),
    ("tokens/processed", "tokens", "tokens of the packed batch, prompts and tool returns included"),
    ("tokens/shared", "tokens", "further tokens that segments share, and that were computed once"),
    ("train/flops", "FLOPs", "model FLOPs of the step, without padding: 6ND + causal attention"),
    ("critic/explained_variance", "share", "variance of the returns that the critic explained before its updates"),
    ("critic/clip_fraction", "share", "trained tokens whose value is clipped"),
    ("critic/value", "1", "value of a trained token, mean"),
    ("critic/return", "1", "return that the critic learns, mean"),
    (f"critic/{METRIC}", "", "the same of the critic's updates: loss, gradient norm, rate"),
    ("train/devices", "devices", "devices of the step, those of hybrid workers included"),
    ("padding_fraction", "share", "padding of the packed batch"),
    ("micro_batches", "count", "micro-batches of the step"),
    ("compiled_shapes", "count", "micro-batch programs compiled so far"),
    ("train/compile_seconds", "seconds", "time in which the step waited for programs to be compiled"),
    ("target_probability", "share", "probability of a demonstration's token, mean; in `warm_start/` alone"),
    (f"warm_start/{METRIC}", "", "trainer's number of the last warm-start step"),
    ("trainer/restarts", "count", "restarts of the trainer in this session; only if there were any"),
    ("trainer/replayed_steps", "steps", "training steps taken again after a restart of the trainer"),
)

_SHARES = _table(
    "hybrid workers",
    ("shares/of", "count", "micro-batches that the trainer and hybrid workers computed once the batch was complete"),
    ("shares/micro_batches", "count", "micro-batches that hybrid workers computed in time"),
    ("shares/late", "count", "micro-batches that came too late, so that the core computed them"),
    ("shares/late/<worker>", "0 or 1", "1 if this worker's channel was closed for being late"),
    ("shares/refused", "count", "micro-batches whose sums did not fit the step"),
    ("shares/wait_seconds", "seconds", "time in which the core waited for hybrid workers"),
    ("shares/bytes", "bytes", "gradient sums received from hybrid workers"),
    ("hybrid/training", "workers", "hybrid workers that train"),
    ("hybrid/generation", "count", "membership generation of the hybrid pool"),
    ("hybrid/now_seconds", "seconds", "step time predicted for the pool as it is"),
    ("hybrid/then_seconds", "seconds", "step time predicted for the best other split of the pool"),
)

_PLANNER = _table(
    "planner",
    ("plan/step_seconds", "seconds", "step time that the planner predicted"),
    ("plan/train_seconds", "seconds", "training time in it"),
    ("plan/rollout_seconds", "seconds", "rollout time in it"),
    ("plan/step_error", "share", "relative error of `plan/step_seconds`"),
    ("plan/saved_seconds", "seconds", "step time predicted for the plan before the last move, less the measured one"),
)

_AGENTS = _table(
    "rollouts",
    ("agent/turns", "turns", "turns of a rollout"),
    ("agent/tool_calls", "calls", "tool calls of a rollout"),
    ("agent/tool_timeouts", "calls", "tool calls of a rollout that timed out"),
    ("agent/tool_success", "share", "rollouts whose last tool call succeeded"),
    ("agent/rewarded_after_tool", "share", "rollouts that were rewarded and had a successful tool call"),
    ("agent/answered", "share", "rollouts that ended with an answer"),
    ("agent/replay_differs", "share", "rollouts that dropped retained tokens because their replay differed"),
    ("agent/moves", "count", "moves of a rollout between engines"),
    ("agent/close_failures", "share", "1 for each rollout whose environment failed to close"),
    ("agent/raised_calls", "calls", "tool calls of a rollout whose tool raised, mean over the rollouts that have any"),
    ("agent/hints", "requests", "requests of a rollout's agent for settings or fields that change nothing"),
    ("agent/hint/<name>", "requests", "those for one setting, mean over the rollouts that have any"),
    ("agent/refused_requests", "requests", "requests of a rollout's agent that the endpoint refused as wrong"),
    ("agent/agent_failed", "share", "rollouts that an agent's own error ended after an output"),
    ("agent/agent_voided", "share", "rollouts with reward 0 whose attempts left nothing to score"),
    ("agent/<number>", "", "number that the environment reported, mean over the rollouts that have it"),
    ("tool/<tool>/calls", "calls", "calls of a tool in the batch; the rarest tools are counted as `(other)`"),
    ("tool/<tool>/failures", "calls", "calls of the tool that failed"),
    ("tool/<tool>/timeouts", "calls", "calls of the tool that timed out"),
    ("tool/<tool>/seconds", "seconds", "duration of a call, mean"),
    ("tool/<tool>/payload_tokens", "tokens", "tokens that a call returned, mean"),
)

_REWARDS = _table(
    "rewards",
    ("reward/mean", "1", "reward, mean over the batch"),
    ("reward/std", "1", "standard deviation of the reward over the batch"),
    ("reward/environment", "1", "environment's own reward before its weight, mean"),
    ("reward/overlong", "1", "penalty of rollouts near their token limit (`algorithm.overlong_buffer`), mean"),
    ("teacher/seconds", "seconds", "wait of a rollout for the scores of a teacher behind a URL, mean"),
    ("reward/<function>", "1", "value of a reward function before its weight, mean"),
    ("reward/<function>/<number>", "", "number that the reward function reported, mean"),
    ("reward_seconds/<function>", "seconds", "duration of a call of the reward function, mean"),
)

_EVALUATION = _table(
    "evaluation",
    ("evaluation/accuracy", "1", "reward on held-out tasks, mean over tasks of the mean over their attempts"),
    (
        f"evaluation/pass_at_{INDEX}",
        "share",
        "held-out tasks that at least one of this number of attempts solves, estimated",
    ),
    ("evaluation/unscored", "rollouts", "held-out rollouts whose environment crashed"),
    ("evaluation/seconds", "seconds", "time of the evaluation"),
    (f"evaluation/{METRIC}", "", "number of rollouts or rewards, over held-out rollouts"),
)

METRICS = (*_STEP, *_ROUTING, *_TRAINER, *_SHARES, *_PLANNER, *_AGENTS, *_REWARDS, *_EVALUATION)
"""All metrics, in the order of the documentation."""

_BY_NAME = {metric.name: metric for metric in METRICS if "<" not in metric.name}
# Longer patterns come first, because `reward/<function>` would also cover `reward/<function>/<number>`.
_PATTERNS = [
    # Any text, slashes included: a tool or a user's function may have any name.
    (metric, re.compile(re.sub(r"<\w+>", "(.+)", re.escape(metric.name).replace(INDEX, r"(\d+)")), re.DOTALL))
    for metric in sorted(METRICS, key=lambda metric: -metric.name.count("/"))
    if "<" in metric.name
]


def plain(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers among `scalars` as plain floats and ints.

    0-d arrays count as numbers; the rest is left out.
    """
    numbers: dict[str, float] = {}
    for name, value in scalars.items():
        if isinstance(value, int | float):
            # bool is an int too, and becomes 0 or 1.
            numbers[name] = int(value) if isinstance(value, int) else value
        else:
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                continue
    return numbers


def encode(step: int, scalars: Mapping[str, float]) -> dict[str, Any]:
    """Returns the object of `metrics.jsonl` for a step."""
    nonfinite = {name: str(value) for name, value in scalars.items() if not math.isfinite(value)}
    # A scalar named `step` must not replace the record's own.
    record: dict[str, Any] = {"step": step}
    record.update((name, None if name in nonfinite else value) for name, value in scalars.items() if name != "step")
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record


def read(path: Path) -> dict[int, dict[str, float]]:
    """Returns the numbers of each step, in order. Several objects of one step are merged, and the last one wins.

    A torn last line, left by a killed run, is not an error.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in files.whole_json_lines(path):
        if not isinstance(record.get("step"), int):
            continue
        numbers = steps.setdefault(record["step"], {})
        numbers |= {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        nonfinite = record.get("nonfinite")
        if isinstance(nonfinite, Mapping):
            # Only these texts: any other would let `float` raise, and the file may come from another program.
            numbers |= {name: float(text) for name, text in nonfinite.items() if text in ("nan", "inf", "-inf")}
    return dict(sorted(steps.items()))
