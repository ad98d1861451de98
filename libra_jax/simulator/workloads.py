"""Makes workloads by name, as `config.workload` of a simulation asks for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.simulator import scripts, synthetic, traces, world

SHAPES = (*synthetic.SHAPES, "trace")


@configuration.group
@dataclass
class WorkloadConfig:
    """The simulated work."""

    shape: str = "swe"  # swe, search, math (synthetic), or trace
    trace: str = ""  # JSON-lines file to replay; required by, and implies, shape trace
    variation: float = 1.0  # width of the difference between siblings, relative to the shape's own
    shuffle: bool = True  # trace: new order of prompts for each pass; False keeps the file's order
    passes: int = 1  # trace: times each prompt is replayed, which sets the run's steps; 0 keeps config.steps
    fit_buckets: bool = False  # trace: fits scheduler.max_remaining_tokens to the trace's lengths (`fitted_bounds`)

    def __post_init__(self) -> None:
        configuration.check_choice(self.shape, SHAPES, "workload.shape")
        configuration.check(self.variation >= 0, "workload.variation", f"must not be negative, not {self.variation}")
        configuration.check(self.passes >= 0, "workload.passes", f"must not be negative, not {self.passes}")
        configuration.check(
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
      config: the workload's settings.
      seed: seed of every draw.
      tasks: prompts that the run is planned to train; the drift of synthetic workloads spreads over them.
      max_context: longest context of a run, in tokens (`rollout.max_context`).

    Raises:
      DataError: the trace cannot be used; the message names file and line.
    """
    if config.trace:
        sigma = traces.WITHIN_PROMPT_SIGMA * config.variation
        path = Path(config.trace)
        return traces.load(path, seed=seed, sigma=sigma, max_context=max_context, shuffle=config.shuffle)
    return synthetic.Synthetic(config.shape, seed, tasks, config.variation)


def summarise(workload: scripts.Workload, tasks: range, samples: int) -> Summary:
    """Summarises the lengths of `samples` rollouts of each of `tasks`."""
    return summary_of([workload.script(task, sample) for task in tasks for sample in range(samples)])


def summary_of(drawn: Sequence[scripts.Script]) -> Summary:
    """Summarises the lengths of these rollouts, at least one."""
    generated = sorted(script.generated_tokens for script in drawn)
    contexts = [script.context_tokens for script in drawn]
    payloads = [turn.payload_tokens for script in drawn for turn in script.turns[:-1]]
    return Summary(
        generated_mean=statistics.fmean(generated),
        generated_p90=generated[int(0.9 * (len(generated) - 1))],
        generated_max=generated[-1],
        context_median=int(statistics.median(contexts)),
        context_max=max(contexts),
        turns_mean=statistics.fmean(len(script.turns) for script in drawn),
        turn_tokens_max=max(turn.generated_tokens for script in drawn for turn in script.turns),
        prompt_mean=statistics.fmean(script.prompt_tokens for script in drawn),
        payload_mean=statistics.fmean(payloads) if payloads else 0.0,
    )


def fitted_bounds(workload: traces.Replay, degrees: Sequence[int]) -> tuple[int, ...]:
    """Returns bucket bounds by which each degree gets tokens in proportion to its devices.

    Args:
      workload: the trace; its trajectories' whole lengths count, which is what they have left when they begin.
      degrees: tensor-parallel degree of each instance.

    Returns:
      Ascending bounds, one for each degree but the largest.
    """
    lengths = sorted(script.generated_tokens for prompt in workload.prompts for script in prompt)
    tokens, taken, bounds = sum(lengths), 0, [0]
    longer = iter(lengths)
    for level in sorted(set(degrees))[:-1]:
        share = sum(degree for degree in degrees if degree <= level) / sum(degrees)
        length = bounds[-1]
        # The shortest trajectories go to the narrowest degree, until it has its share of the tokens.
        while taken < share * tokens:
            length = next(longer)
            taken += length
        # Bounds must ascend strictly.
        bounds.append(max(length, bounds[-1] + 1))
    return tuple(bounds[1:])


def planned_steps(config: WorkloadConfig, workload: scripts.Workload, groups_per_step: int, steps: int) -> int:
    """Returns the training steps of the run: `steps`, or for a trace the number that replays it `config.passes`
    times."""
    if isinstance(workload, traces.Replay) and config.passes:
        return max(1, -(-len(workload.prompts) * config.passes // groups_per_step))
    return steps


def check_fits(workload: scripts.Workload, config: configuration.RunConfig, simulation: world.SimulationConfig) -> None:
    """Checks a sample of the workload's rollouts against the run's limits and memory.

    A cache need not hold every slot's longest context, since engines pre-empt. But it must hold every slot's context at
    its first tool return.

    Raises:
      ConfigError: a rollout would be cut short, or there are more slots than memory; the message names the field.
    """
    tasks = config.steps * config.coordinator.groups_per_step
    # Spread over the whole run, because lengths drift.
    sampled = range(0, tasks, max(1, tasks // 64))
    summary = summarise(workload, sampled, min(16, config.coordinator.group_size))
    for field, limit, needed in (
        ("rollout.max_context", config.rollout.max_context, summary.context_max + 1),
        ("rollout.max_tokens", config.rollout.max_tokens, summary.turn_tokens_max),
    ):
        if limit < needed:
            raise protocols.ConfigError(f"config.{field}: {limit} cuts attempts of the workload short; give {needed}")
    first = int(statistics.median(_first_context(workload.script(task, 0)) for task in sampled))
    given = (("simulation.slots", simulation.slots), ("rollout.slots_by_instance", config.rollout.slots_by_instance))
    name = next((field for field, slots in given if slots), "rollout.slots")
    model, degrees = simulation.cost_model(), config.rollout.tensor_parallel
    for degree, slots in zip(degrees, simulation.slots or config.rollout.instance_slots, strict=False):
        room = max(0, model.kv_tokens(degree))
        if slots * first > room:
            raise protocols.ConfigError(
                f"config.{name}: {slots} slots exceed the memory of an instance of tensor-parallel degree {degree}, "
                f"whose cache of {room} tokens holds {room // first} requests at their first tool return ({first} "
                f"tokens) and {room // config.rollout.max_context} at full context; give fewer"
            )


def _first_context(script: scripts.Script) -> int:
    turn = script.turns[0]
    return script.prompt_tokens + turn.generated_tokens + turn.payload_tokens
