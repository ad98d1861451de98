"""Workloads by name, as `config.workload` of a simulation asks for: synthetic ones, and replayed traces.

The synthetic workloads are shaped like the figures that Libra's authors publish of theirs (arXiv 2606.03077).

* `swe`, software engineering. Published: the mean of generated tokens drifts from 2.5k to 11.5k over a run. The longest
  tenth of a batch takes more than half of its rollout time. Tool returns of about 1k tokens lead to trajectories of
  under 8k, returns of 12.5k to about 21k, and repeated failures to more than 40k.
* `search`. Published: short trajectories, and 91% of requests sent to the right bucket at their first tool return.
* `math`. Published: long outputs without tools. Nothing tells a long output from a short one before it ends.
* `agents`. The rollouts of `swe` by an agent that summarises its history when the context has grown, and leaves some
  work to sub-agents. Its figures are ours (`COMPACTION_TOKENS` and what follows it); nothing published is behind them.

A trajectory's length is mostly drawn for each sample, and only weakly for its prompt. So siblings differ nearly as
much as strangers, and only the tool returns tell them apart. `variation` widens or narrows that difference. A script
is a pure function of (seed, task index, sample): the same numbers on every machine, in any order of calls.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import scripts, traces, world

LARGE_RETURN_TOKENS = 12_500
TIMEOUT_SHARE = 0.01
"""Share of failures that time out. In the AgentCgroup measurements, 0.3% of all tool calls time out; their calls
take 3 s on average, as do those here."""

FAR_TAIL = 1.6
"""Longest trajectory of repeated failures, as a multiple of their mean, so that contexts stay bounded."""


@dataclass(frozen=True)
class Kind:
    """One course that a software-engineering rollout may take.

    Attributes:
      share: share of all trajectories, at the run's start and at its end.
      tokens: mean of generated tokens, at the run's start and at its end.
      turn_tokens: mean of a turn's generated tokens.
      spread: spread of the length's logarithm, relative to the workload's.
    """

    share: tuple[float, float]
    tokens: tuple[float, float]
    turn_tokens: int
    spread: float


# Shares and means give 0.965 x 1,694 + 0.03 x 21,000 + 0.005 x 47,000 = 2,500 tokens at the start, and
# 0.705 x 4,440 + 0.22 x 21,000 + 0.075 x 50,000 = 11,500 at the end.
PLAIN = Kind((0.965, 0.705), (1_694.0, 4_440.0), 450, 1.0)
LARGE = Kind((0.03, 0.22), (21_000.0, 21_000.0), 950, 0.6)
FAILING = Kind((0.005, 0.075), (47_000.0, 50_000.0), 1_400, 0.5)


@dataclass(frozen=True)
class _Draw:
    """The random numbers of one script: those of its prompt and those of the sample itself."""

    prompt: random.Random
    sample: random.Random
    variation: float

    def share_below(self) -> float:
        """Returns a uniform number on (0, 1); siblings share a fifth of its variance (at `variation` 1)."""
        # A fifth at variation 1; less if samples vary more.
        between = 1.0 / (1.0 + 4.0 * self.variation**2)
        normal = math.sqrt(between) * self.prompt.gauss(0.0, 1.0)
        normal += math.sqrt(1.0 - between) * self.sample.gauss(0.0, 1.0)
        return 0.5 * (1.0 + math.erf(normal / math.sqrt(2.0)))

    def factor(self, between: float, within: float) -> float:
        """Returns a log-normal factor of mean 1."""
        within *= self.variation
        normal = between * self.prompt.gauss(0.0, 1.0) + within * self.sample.gauss(0.0, 1.0)
        # Minus half the variance, so that the mean of the factor is 1.
        return math.exp(normal - (between**2 + within**2) / 2.0)


def swe(draw: _Draw, progress: float) -> scripts.Script:
    """Returns a software-engineering rollout, `progress` (0 to 1) of the way through the run."""
    rng, place, kind = draw.sample, draw.share_below(), PLAIN
    shares = [first + (last - first) * progress for first, last in (PLAIN.share, LARGE.share, FAILING.share)]
    if place > shares[0]:
        kind = LARGE if place < shares[0] + shares[1] else FAILING
    first_mean, last_mean = kind.tokens
    factor = min(draw.factor(0.15 * kind.spread, 0.35 * kind.spread), FAR_TAIL if kind is FAILING else 3.0)
    total = max(60, round((first_mean + (last_mean - first_mean) * progress) * factor))
    generated = _split(total, max(3, round(total / kind.turn_tokens)), rng)
    turns = []
    for tokens in generated[:-1]:  # tool calls that mostly succeed and return about 1k tokens
        tool = rng.choices(("bash", "read", "edit"), (5, 3, 2))[0]
        status: protocols.ToolStatus = "failure" if rng.random() < 0.1 else "success"
        payload = _log_normal(rng, 150 if tool == "edit" else 1_000, 0.5, 6_000)
        turns.append(protocols.Turn(tokens, tool, status, payload, _seconds(rng, 1.5, 300.0)))
    # The sign of the kind: one very large return, or repeated failures, from one of the first turns on.
    first = rng.choices((0, 1, 2), (0.7, 0.2, 0.1))[0]
    # A few plain rollouts get a large return too, so that the sign is not perfect.
    if kind is LARGE or (kind is PLAIN and rng.random() < 0.02):
        turn = turns[min(first, len(turns) - 1)]
        turn.tool, turn.status = "read", "success"
        turn.payload_tokens = _log_normal(rng, LARGE_RETURN_TOKENS, 0.15, 25_000)
    for turn in turns[first:] if kind is FAILING else ():
        if rng.random() < 0.75:
            turn.tool, turn.status, turn.payload_tokens = "bash", "failure", _log_normal(rng, 600, 0.4, 3_000)
            if rng.random() < TIMEOUT_SHARE:
                turn.status, turn.payload_tokens, turn.tool_seconds = "timeout", 20, 120.0
    return scripts.Script(_log_normal(draw.prompt, 1_500, 0.5, 8_000), (*turns, protocols.Turn(generated[-1])))


def search(draw: _Draw, progress: float) -> scripts.Script:
    """Returns a search rollout: a first hit leads to a quick answer, an empty result to a longer search.

    In 9% of rollouts the first result misleads, so that even a perfect predictor from causes reaches only 91%.
    """
    long = draw.share_below() > 0.86
    misleading = draw.sample.random() < 0.09
    total = max(60, round((5_000 if long else 600) * min(draw.factor(0.1, 0.25), 3.0)))
    generated = _split(total, 8 if long else draw.sample.randint(2, 4), draw.sample)
    turns = []
    for index, tokens in enumerate(generated[:-1]):
        empty = long != misleading if index == 0 else draw.sample.random() < (0.5 if long else 0.05)
        payload = 40 if empty else _log_normal(draw.sample, 350, 0.4, 2_000)
        status: protocols.ToolStatus = "failure" if empty else "success"
        turns.append(protocols.Turn(tokens, "search", status, payload, _seconds(draw.sample, 0.4, 10.0)))
    return scripts.Script(_log_normal(draw.prompt, 150, 0.4, 1_000), (*turns, protocols.Turn(generated[-1])))


def mathematics(draw: _Draw, progress: float) -> scripts.Script:
    """Returns one long output without a tool: mean 8k tokens, log-normal, at most 32k."""
    total = min(32_000, max(60, round(8_000 * draw.factor(0.5, 0.6))))
    return scripts.Script(_log_normal(draw.prompt, 200, 0.4, 1_000), (protocols.Turn(total),))


COMPACTION_TOKENS = 16_000
"""Context at which the agent of `agents` summarises its history."""

SUMMARY_TOKENS = 800
"""Median tokens of a summary."""

DELEGATED = 0.06
"""Share of turns after which that agent calls a sub-agent for the next turns."""

SUB_AGENT_TURNS = (2, 8)
"""Fewest and most turns of a sub-agent."""

SUB_AGENT_PROMPT, SHARED_PROMPT = 900, 400
"""Tokens of a sub-agent's prompt, and of its beginning that all prompts share: the tools."""


def agents(draw: _Draw, progress: float) -> scripts.Script:
    """Returns a software-engineering rollout whose turns are spread over segments."""
    plain = swe(draw, progress)
    *before, last = plain.turns
    rng, prompt = draw.sample, plain.prompt_tokens
    turns: list[protocols.Turn] = []
    places: list[int] = []
    segments: list[scripts.ScriptedSegment] = []
    main, context = 0, prompt  # the main line's present segment, and its context
    index = 0

    def add(turn: protocols.Turn, place: int) -> int:
        """Adds a turn; returns the tokens that it adds to the context."""
        turns.append(turn)
        places.append(place)
        return turn.generated_tokens + turn.payload_tokens

    while index < len(before):
        if context > COMPACTION_TOKENS:
            summary = _log_normal(rng, SUMMARY_TOKENS, 0.3, 3_000)
            add(protocols.Turn(summary), main)
            segments.append(scripts.ScriptedSegment(0, prompt, summary))
            main, context = len(segments), prompt + summary
        context += add(before[index], main)
        index += 1
        if rng.random() < DELEGATED and index + SUB_AGENT_TURNS[0] <= len(before):
            report = _log_normal(rng, 400, 0.4, 2_000)
            context += add(protocols.Turn(_log_normal(rng, 120, 0.4, 600), "task", "success", report, 0.1), main)
            shared = min(SHARED_PROMPT, prompt)
            segments.append(scripts.ScriptedSegment(0, shared, SUB_AGENT_PROMPT - shared))
            count = rng.randint(*SUB_AGENT_TURNS)
            for turn in before[index : index + count]:
                add(turn, len(segments))
            add(protocols.Turn(report), len(segments))
            index += count
    add(last, main)
    return scripts.Script(prompt, tuple(turns), None, tuple(segments), tuple(places) if segments else ())


SHAPES: dict[str, Callable[[_Draw, float], scripts.Script]] = {
    "swe": swe,
    "search": search,
    "math": mathematics,
    "agents": agents,
}


DRIFTS = ("grow", "reverse")
"""Courses of the lengths of `swe` and `agents` over a run: they grow to its end, or to its middle and then shrink to
their first values again."""


@dataclass(frozen=True)
class Synthetic:
    """A synthetic `scripts.Workload`.

    Attributes:
      shape: one of `SHAPES`.
      tasks: prompts that the whole run is planned to train; the drift of `swe` spreads over them.
      variation: width of the difference between siblings, relative to the shape's own.
      drift: one of `DRIFTS`.
    """

    shape: str
    seed: int
    tasks: int
    variation: float = 1.0
    drift: str = "grow"

    def script(self, task_index: int, sample: int) -> scripts.Script:
        # Seeded by text: Python hashes it the same way on every machine, and siblings share the prompt's numbers.
        name = f"{self.shape}/{self.seed}/{task_index}"
        draw = _Draw(random.Random(name), random.Random(f"{name}/{sample}"), self.variation)
        progress = min(1.0, task_index / max(1, self.tasks - 1))
        if self.drift == "reverse":
            progress = 1.0 - abs(2.0 * progress - 1.0)
        return SHAPES[self.shape](draw, progress)


def _log_normal(rng: random.Random, median: float, spread: float, maximum: int) -> int:
    return min(maximum, max(1, round(median * math.exp(rng.gauss(0.0, spread)))))


def _seconds(rng: random.Random, median: float, maximum: float) -> float:
    return round(min(maximum, median * math.exp(rng.gauss(0.0, 1.2))), 3)


def _split(total: int, count: int, rng: random.Random) -> list[int]:
    """Splits `total` into `count` parts of at least 1 each, unevenly (gamma-distributed weights of shape 2)."""
    weights = [rng.gammavariate(2.0, 1.0) for _ in range(count)]
    # One token each is set aside, so that rounding down never leaves a turn empty.
    scale = (total - count) / sum(weights)
    parts = [1 + int(weight * scale) for weight in weights]
    parts[-1] += total - sum(parts)
    return parts


@dataclass
@config_lib.group("workload")
class WorkloadConfig:
    """The simulated work."""

    shape: str = config_lib.field("swe", choices=(*SHAPES, "trace"))  # swe, search, math, agents (synthetic), or trace
    trace: str = ""  # JSON-lines file to replay; required by, and implies, shape trace
    # Width of the difference between siblings, relative to the shape's own.
    variation: float = config_lib.field(1.0, ge=0)
    # swe, agents: lengths grow to the run's end, or reverse: grow to its middle and shrink again.
    drift: str = config_lib.field("grow", choices=DRIFTS)
    shuffle: bool = True  # trace: new order of prompts for each pass; False keeps the file's order
    # trace: times each prompt is replayed, which sets the run's steps; 0 keeps config.steps.
    passes: int = config_lib.field(1, ge=0)
    # trace: prompts that are replayed: all, even or odd ones in the order of the file.
    part: str = config_lib.field("all", choices=tuple(traces.PARTS))
    fit_buckets: bool = False  # trace: fits scheduler.max_remaining_tokens to the trace's lengths (`fitted_bounds`)

    def __post_init__(self) -> None:
        config_lib.check(
            self.shape != "trace" or bool(self.trace),
            "workload.trace",
            "shape trace replays a file: name it here or with --trace=FILE",
        )


@dataclass(frozen=True)
class Summary:
    """Lengths of a sample of a workload, in tokens a trajectory.

    Attributes:
      generated_mean: mean of generated tokens.
      generated_p90: generated tokens that nine trajectories in ten stay below.
      generated_max: generated tokens of the longest trajectory.
      context_median: median of the whole context at the end, prompt and tool returns included.
      context_max: tokens of the longest context.
      turns_mean: mean number of model outputs.
      turn_tokens_max: generated tokens of the longest turn.
      prompt_mean: mean tokens of the prompt.
      payload_mean: mean tokens of a tool return; 0 if no tool is called.
    """

    generated_mean: float
    generated_p90: int
    generated_max: int
    context_median: int
    context_max: int
    turns_mean: float
    turn_tokens_max: int
    prompt_mean: float
    payload_mean: float

    def __str__(self) -> str:
        """Returns a clause for tables and titles."""
        turns = f"{self.turns_mean:.3g} turns" if self.turns_mean != 1.0 else "1 turn"
        tools = f", tool returns of {self.payload_mean:,.0f}" if self.turns_mean > 1.0 else ""
        return (
            f"{self.generated_mean:,.0f} generated tokens in the mean (P90 {self.generated_p90:,}, at most "
            f"{self.generated_max:,}) over {turns}{tools}; prompts of {self.prompt_mean:,.0f}, contexts of at most "
            f"{self.context_max:,}"
        )


def create(config: WorkloadConfig, *, seed: int, tasks: int, max_context: int) -> scripts.Workload:
    """Returns the workload that `config` names.

    Args:
      tasks: prompts that the run is planned to train; the drift of synthetic workloads spreads over them.
      max_context: longest context of a run, in tokens (`rollout.max_context`).

    Raises:
      DataError: the trace cannot be used; the message names file and line.
    """
    if config.trace:
        sigma = traces.WITHIN_PROMPT_SIGMA * config.variation
        path = Path(config.trace)
        return traces.load(
            path, seed=seed, sigma=sigma, max_context=max_context, shuffle=config.shuffle, part=config.part
        )
    return Synthetic(config.shape, seed, tasks, config.variation, config.drift)


def summary_of(rollouts: Sequence[scripts.Script]) -> Summary:
    """Summarises the lengths of these rollouts, at least one."""
    generated = sorted(script.generated_tokens for script in rollouts)
    contexts = [script.context_tokens for script in rollouts]
    payloads = [turn.payload_tokens for script in rollouts for turn in script.turns[:-1]]
    return Summary(
        generated_mean=statistics.fmean(generated),
        generated_p90=generated[int(0.9 * (len(generated) - 1))],
        generated_max=generated[-1],
        context_median=int(statistics.median(contexts)),
        context_max=max(contexts),
        turns_mean=statistics.fmean(len(script.turns) for script in rollouts),
        turn_tokens_max=max(turn.generated_tokens for script in rollouts for turn in script.turns),
        prompt_mean=statistics.fmean(script.prompt_tokens for script in rollouts),
        payload_mean=statistics.fmean(payloads) if payloads else 0.0,
    )


def fitted_bounds(rollouts: Iterable[scripts.Script], kinds: Sequence[protocols.Kind]) -> tuple[int, ...]:
    """Returns bucket bounds by which each kind of instance gets tokens in proportion to its devices.

    Args:
      rollouts: scripts; the whole lengths of their segments count, which is what they have left when they begin.
      kinds: degree and accelerator of each instance.

    Returns:
      Ascending bounds, one for each kind but the last.
    """
    # By tokens, not by requests: a bucket's load is what it has to decode.
    lengths = sorted(itertools.chain.from_iterable(script.lengths().values() for script in rollouts))
    tokens, assigned_tokens, bounds = sum(lengths), 0, [0]
    longer = iter(lengths)
    for level in sorted(set(kinds))[:-1]:
        share = sum(kind[0] for kind in kinds if kind <= level) / sum(degree for degree, _ in kinds)
        length = bounds[-1]
        # The shortest requests go to the first kind, until it has its share of the tokens.
        while assigned_tokens < share * tokens:
            length = next(longer)
            assigned_tokens += length
        # Bounds must ascend strictly.
        bounds.append(max(length, bounds[-1] + 1))
    return tuple(bounds[1:])


def check_fits(workload: scripts.Workload, config: config_lib.RunConfig, simulation: world.SimulationConfig) -> None:
    """Checks a sample of the workload's rollouts against the run's limits and memory.

    A cache need not hold every slot's longest context, since engines pre-empt. But it must hold every slot's context at
    its first tool return.

    Raises:
      ConfigError: a rollout would be cut short, or there are more slots than memory; the message names the field.
    """
    tasks = config.steps * config.coordinator.groups_per_step
    # Spread over the whole run, because lengths drift.
    sampled = range(0, tasks, max(1, tasks // 64))
    samples = range(min(16, config.coordinator.group_size))
    summary = summary_of([workload.script(task, sample) for task in sampled for sample in samples])
    for field, limit, needed in (
        ("rollout.max_context", config.rollout.max_context, summary.context_max + 1),
        ("rollout.max_tokens", config.rollout.max_tokens, summary.turn_tokens_max),
    ):
        if limit < needed:
            raise protocols.ConfigError(f"config.{field}: {limit} cuts rollouts of the workload short; give {needed}")
    firsts = [workload.script(task, 0) for task in sampled]
    first = int(
        statistics.median(
            script.prompt_tokens + script.turns[0].generated_tokens + script.turns[0].payload_tokens
            for script in firsts
        )
    )
    slot_settings = (
        ("simulation.slots", simulation.slots),
        ("rollout.slots_by_instance", config.rollout.slots_by_instance),
    )
    name = next((field for field, slots in slot_settings if slots), "rollout.slots")
    models, degrees = simulation.instance_models(config), config.rollout.tensor_parallel
    for model, degree, slots in zip(models, degrees, simulation.instance_slots(config.rollout), strict=True):
        room = max(0, model.kv_tokens(degree))
        if slots * first > room:
            raise protocols.ConfigError(
                f"config.{name}: {slots} slots exceed the memory of an instance of tensor-parallel degree {degree} "
                f"on {model.sheet.name}, "
                f"whose cache of {room} tokens holds {room // first} requests at their first tool return ({first} "
                f"tokens) and {room // config.rollout.max_context} at full context; give fewer"
            )
