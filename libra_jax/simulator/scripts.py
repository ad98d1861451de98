"""Scripts of simulated rollouts: the contract between workloads and the simulated machines; and requested lengths.

A script is fixed before the rollout begins, so that every scheduling policy is measured on the same work.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from libra_jax import protocols


@dataclass(frozen=True)
class ScriptedSegment:
    """A scripted segment after a rollout's first one (`protocols.Segment`).

    Attributes:
      parent: number of the segment with whose context it begins; None if it shares no token.
      shared_tokens: first tokens of the parent's context that it shares.
      prompt_tokens: own tokens before its first output.
    """

    parent: int | None
    shared_tokens: int
    prompt_tokens: int


class ScriptedOutput(NamedTuple):
    """One model output of a script, with the context that it continues.

    Attributes:
      turn: the output, and the tool return after it.
      segment: number of its segment.
      cached: tokens of the context that had been computed before: earlier ones of the segment, or shared ones.
      fresh: tokens of the context after those.
      goes_on: whether the segment has a later output, and so the tool return is shown.
    """

    turn: protocols.Turn
    segment: int
    cached: int
    fresh: int
    goes_on: bool


@dataclass(frozen=True)
class Script:
    """One rollout, as it would run without any fault.

    Attributes:
      prompt_tokens: tokens of the prompt; the same for all samples of a task.
      turns: model outputs and the tool returns that follow them, at least one; the last turn's return ends the rollout.
        A turn generates at least one token, the stop token. `tool` None is a turn that calls no tool.
      limit: one of `protocols.LIMITS` that ended the recorded rollout; None if no limit did.
      segments: the segments after the first one; a parent comes before its children.
      places: number of each turn's segment, from 0; empty if all are in the first one.
    """

    prompt_tokens: int
    turns: tuple[protocols.Turn, ...]
    limit: str | None = None
    segments: tuple[ScriptedSegment, ...] = ()
    places: tuple[int, ...] = ()

    def outputs(self) -> Iterator[ScriptedOutput]:
        """Yields the outputs in order, each with its context."""
        places = self.places or (0,) * len(self.turns)
        last = {place: index for index, place in enumerate(places)}
        lengths: dict[int, int] = {}
        owed: dict[int, int] = {0: self.prompt_tokens}  # tokens that the next output of the segment sees first
        for index, (turn, place) in enumerate(zip(self.turns, places, strict=True)):
            if place and place not in lengths:
                segment = self.segments[place - 1]
                lengths[place], owed[place] = segment.shared_tokens, segment.prompt_tokens
            cached, fresh = lengths.get(place, 0), owed[place]
            yield ScriptedOutput(turn, place, cached, fresh, index < last[place])
            lengths[place] = cached + fresh + max(1, turn.generated_tokens)
            owed[place] = turn.payload_tokens

    def lengths(self) -> dict[int, int]:
        """Returns the generated tokens of each segment that has turns, by its number."""
        lengths: dict[int, int] = {}
        for turn, place in zip(self.turns, self.places or (0,) * len(self.turns), strict=True):
            lengths[place] = lengths.get(place, 0) + max(1, turn.generated_tokens)
        return lengths

    @property
    def generated_tokens(self) -> int:
        """Tokens that the policy samples, over all turns."""
        return sum(max(1, turn.generated_tokens) for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest context, without a last turn's tool return, which is never shown."""
        return max(output.cached + output.fresh + max(1, output.turn.generated_tokens) for output in self.outputs())

    @property
    def own_tokens(self) -> int:
        """Tokens of all segments, shared ones counted once: those that training processes.

        Equal to `context_tokens` if there is one segment.
        """
        return sum(output.fresh + max(1, output.turn.generated_tokens) for output in self.outputs())


class Workload(Protocol):
    """Scripts by position: pure and seeded, so that any call may be repeated."""

    def script(self, task_index: int, sample: int) -> Script:
        """Returns the script of one sample of the `task_index`-th task; any index >= 0 is valid."""
        ...


MOST_TOKENS = 10_000_000
"""Most tokens of any requested length: hundreds of times the longest context that models have."""

MOST_TURNS = 1_000
"""Most turns of a made-up rollout: each turn of thousands of rollouts is an object."""

CALL_SECONDS = 1.0
"""Seconds of a tool call, if the reshaped rollouts have none."""

_NORMAL = statistics.NormalDist()
_Z90 = _NORMAL.inv_cdf(0.9)
STEEPEST = math.exp(_Z90**2 / 2.0)
"""Largest ratio of P90 to mean that a log-normal has: 2.27."""


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal.

    Attributes:
      mean: mean length, in tokens.
      spread: standard deviation of the logarithm.
    """

    mean: float
    spread: float

    @classmethod
    def fitted(cls, mean: float, p90: float) -> LogNormal:
        """Returns the log-normal with this mean and this P90.

        With spread s, ln(p90 / mean) = z s - s^2 / 2, where z = 1.28 is the normal P90. Of the two roots the smaller is
        taken. The larger root exceeds z: its mean lies beyond its P90, or depends on a handful of rollouts.

        Args:
          mean: mean length, in tokens.
          p90: tokens that nine rollouts in ten stay below.

        Raises:
          ConfigError: a number is no length, or no log-normal has both; the message gives the possible range.
        """
        for name, value in (("mean", mean), ("P90", p90)):
            if not 1 <= value <= MOST_TOKENS:  # NaN fails this check, too
                raise protocols.ConfigError(
                    f"--generated_tokens: {value:g} is no {name} of a length; give 1 to {MOST_TOKENS:,} tokens"
                )
        if not 1.0 <= p90 / mean <= STEEPEST:
            raise protocols.ConfigError(
                f"--generated_tokens: no log-normal that a sample shows has mean {mean:g} and P90 {p90:g}; with this "
                f"mean the P90 lies between {math.ceil(mean):,} and {math.floor(STEEPEST * mean):,}. Give such a pair, "
                "or recorded rollouts with --trace"
            )
        # Rounding may make the discriminant slightly negative at the steepest ratio.
        inside = max(0.0, _Z90**2 - 2.0 * math.log(p90 / mean))
        return cls(mean, _Z90 - math.sqrt(inside))

    def sample(self, count: int) -> list[int]:
        """Returns `count` ascending lengths: the mean of each of `count` equally likely ranges, so that the mean of
        all is the distribution's."""
        if self.spread == 0.0:
            return [round(self.mean)] * count
        edges = [-math.inf, *(_NORMAL.inv_cdf(index / count) for index in range(1, count)), math.inf]
        # The partial expectation of a log-normal, in closed form.
        below = [_NORMAL.cdf(edge - self.spread) if math.isfinite(edge) else float(edge > 0) for edge in edges]
        return [max(1, round(self.mean * count * (high - low))) for low, high in itertools.pairwise(below)]


@dataclass(frozen=True)
class RequestedLengths:
    """Requested lengths of rollouts; None leaves a property unchanged.

    Attributes:
      generated: generated tokens; a plain number is the mean to which all are scaled.
      turns: model outputs of every rollout, all of one length.
      payload_tokens: tokens of every tool return.
      prompt_tokens: tokens of every prompt.
    """

    generated: LogNormal | float | None = None
    turns: int | None = None
    payload_tokens: int | None = None
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value, minimum, maximum in (
            ("generated_tokens", self.generated, 1, MOST_TOKENS),
            ("turns", self.turns, 1, MOST_TURNS),
            ("payload_tokens", self.payload_tokens, 0, MOST_TOKENS),
            ("prompt_tokens", self.prompt_tokens, 1, MOST_TOKENS),
        ):
            number = value if isinstance(value, int | float) else minimum
            if not minimum <= number <= maximum:
                raise protocols.ConfigError(f"--{name}: {number:g} is out of range; give {minimum} to {maximum:,}")

    def __bool__(self) -> bool:
        return any(getattr(self, item.name) is not None for item in dataclasses.fields(self))


def reshaped(rollouts: Sequence[Script], targets: RequestedLengths) -> list[Script]:
    """Returns the rollouts, in the same order, with the lengths of `targets`; the longest stays the longest.

    Raises:
      ConfigError: a payload is requested but no tool is called, or turns are requested and the payload is unknown.
    """
    # The last turn's return is never shown, so it counts for nothing.
    calls = [turn for script in rollouts for turn in script.turns[:-1]]
    if targets.payload_tokens is not None and targets.turns in (None, 1) and (targets.turns or not calls):
        raise protocols.ConfigError(
            "--payload_tokens: the rollouts have one turn, and a tool returns only between two; give --turns=2 or more"
        )
    if (targets.turns or 1) > 1 and targets.payload_tokens is None and not calls:
        raise protocols.ConfigError(
            "--turns: what a tool returns between them is not known, as no rollout calls one; give --payload_tokens"
        )
    shaped = list(rollouts)
    if targets.turns is not None:
        # Equal turns, with the mean tool call of all rollouts between them.
        seconds = statistics.fmean(turn.tool_seconds for turn in calls) if calls else CALL_SECONDS
        payload = round(statistics.fmean(turn.payload_tokens for turn in calls)) if calls else 0
        for at, one in enumerate(shaped):
            turn_tokens, before = max(1, one.generated_tokens // targets.turns), targets.turns - 1
            call = protocols.Turn(turn_tokens, "tool", "success", payload, seconds)
            last = protocols.Turn(max(1, one.generated_tokens - before * turn_tokens))
            shaped[at] = dataclasses.replace(one, turns=(*[call] * before, last))
    if targets.payload_tokens is not None:
        for at, one in enumerate(shaped):
            returns = (dataclasses.replace(turn, payload_tokens=targets.payload_tokens) for turn in one.turns[:-1])
            shaped[at] = dataclasses.replace(one, turns=(*returns, one.turns[-1]))
    if targets.prompt_tokens is not None:
        shaped = [dataclasses.replace(one, prompt_tokens=targets.prompt_tokens) for one in shaped]
    # Last, because the turns above keep each rollout's total and this step sets it.
    if targets.generated is not None:
        totals = [one.generated_tokens for one in shaped]
        if isinstance(targets.generated, LogNormal):
            # By rank, so that the longest stays the longest and a policy finds the same rollouts hard.
            ranks = sorted(range(len(shaped)), key=totals.__getitem__)
            by_rank = dict(zip(ranks, targets.generated.sample(len(shaped)), strict=True))
            lengths = [by_rank[index] for index in range(len(shaped))]
        else:
            factor = targets.generated / statistics.fmean(totals)
            lengths = [max(1, round(factor * total)) for total in totals]
        shaped = [
            dataclasses.replace(one, turns=_long(one.turns, tokens))
            for one, tokens in zip(shaped, lengths, strict=True)
        ]
    return shaped


def cut(script: Script, max_context: int) -> Script:
    """Returns the script up to where a context is full, as a run with this `rollout.max_context` would end it."""
    turns: list[protocols.Turn] = []
    for output in script.outputs():
        room = max_context - output.cached - output.fresh
        if output.turn.generated_tokens > room:
            turns += [protocols.Turn(room)] if room > 0 else []
            break
        turns.append(output.turn)
    else:
        return script
    prompt = min(script.prompt_tokens, max_context - 1)
    places = script.places[: len(turns)]
    return dataclasses.replace(
        script, prompt_tokens=prompt, turns=tuple(turns) or (protocols.Turn(1),), limit="max_context", places=places
    )


def _long(turns: Sequence[protocols.Turn], tokens: int) -> tuple[protocols.Turn, ...]:
    """Returns the same turns with `tokens` generated tokens; if there are more turns than tokens, drops the first
    turns."""
    # A turn has at least one token. The last turns are kept, since the answer is among them.
    last_turns, before = turns[-tokens:], 0
    total = sum(max(1, turn.generated_tokens) for turn in last_turns)
    result, running_total = [], 0
    for number, turn in enumerate(last_turns, start=1):
        running_total += max(1, turn.generated_tokens)
        # Rounds the running total, so that the parts add up, and leaves a token for each later turn.
        until = min(max(before + 1, round(tokens * running_total / total)), tokens - (len(last_turns) - number))
        result.append(dataclasses.replace(turn, generated_tokens=until - before))
        before = until
    return tuple(result)
