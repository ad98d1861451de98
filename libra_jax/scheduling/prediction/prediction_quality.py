"""Prediction quality: how well C-MLFQ's evidence predicts what is left at a tool return, on recorded trajectories.

At each tool return after which the policy wrote on, the tokens from there to the end had to be predicted. A prediction
uses what the scheduler of a run would have known: trajectories that had ended by then. Those of a step are taken to
begin together and to be generated at one speed. The first step is learnt from and not judged. Three *buckets* of about
equally many returns stand for those of a layout.

How much more the evidence tells than one distribution of lengths for all requests (`evidence=mean`) is measured in
bits a return: by how much the logarithm of the probability of what came true is larger (`loss`).
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling.prediction import evidence, paths, prefix_tree

BUCKETS = 3

STEP_TRAJECTORIES = 64
"""Trajectories that count as a training step if a trace does not tell its steps."""

COVERED = 0.775
"""Probability of a sketch between the first of its quantiles and the last but one, whose levels are 0.1 and 0.875."""

NO_TOOL = "environment"
"""The agent loop's name for the return of an output that called no tool and did not end the rollout."""

OUTSIDE = 0.03
"""Mass that is spread evenly over all lengths."""

OCTAVES = 17.0
"""Width of that spread: lengths up to 131,072 tokens."""

NEAR = 0.25
"""Octaves up to which a length counts as the one that was predicted."""

LOWER_RANGE, UPPER_RANGE = 1.6, 2.5
"""Range of the lowest three, and of the highest three quantiles, in scales of the tail beyond it."""

NARROWEST_TAIL = 0.15
"""Least scale of a tail in octaves."""


@dataclass(frozen=True)
class RecordedRollout:
    """The part of a recorded trajectory, or of one of its segments, that counts here.

    Attributes:
      step: the training step that it was trained in; None if the trace does not say.
      generated: tokens of each turn.
      returns: causal state after each turn but the last.
    """

    prompt_id: str
    step: int | None
    generated: tuple[int, ...]
    returns: tuple[protocols.CausalState, ...]


@dataclass(frozen=True)
class LabelledState:
    """A causal state, and what was left to generate after it.

    Attributes:
      tool: name of the tool that returned.
      size_class: size class of its payload (`paths.causal_key`).
      status: outcome of the call.
      count: number of returns.
      mean: mean tokens left.
      p90: 90th percentile of the tokens left (nearest rank).
    """

    tool: str
    size_class: int
    status: str
    count: int
    mean: float
    p90: int


@dataclass(frozen=True)
class PredictionQuality:
    """How well the tokens left were predicted. Shares are NaN if there was nothing to judge.

    Attributes:
      states: the causal states, the most frequent first.
      explained: share of the variance of what is left that lies between causal states (epsilon squared: corrected for
        their number, so that states which tell nothing are at 0 in the mean).
      bounds: bounds of the buckets: tokens up to which a return belongs to the first, the second, ...
      judged: returns of the steps after the first; the attributes that follow are about these.
      majority: share of them in the fullest bucket: the result of naming one bucket each time.
      by_state: share whose bucket is the one that had been the most frequent after their causal state.
      by_path: share whose bucket is the likeliest one by all that C-MLFQ knows: the path, its siblings, their ends.
      path_explained: share of the variance that its mean prediction explains; below 0 it is worse than a constant.
      confusion: returns by true bucket (rows) and by the bucket that C-MLFQ named (columns).
      bits: bits a return that its predictions are better than those of one distribution for all requests.
      bits_error: standard error of `bits`, over prompts.
      covered: share of returns whose remainder lies between the quantiles that should hold `COVERED` of them.
    """

    states: tuple[LabelledState, ...]
    explained: float
    bounds: tuple[int, ...]
    judged: int
    majority: float
    by_state: float
    by_path: float
    path_explained: float
    confusion: tuple[tuple[int, ...], ...]
    bits: float
    bits_error: float
    covered: float


def rollouts(record: Mapping[str, Any]) -> list[RecordedRollout]:
    """Reads a record of a trace. Each segment of a rollout counts as a rollout of its own, as it does in routing."""
    step = record.get("step")
    by_segment: dict[int, list[Mapping[str, Any]]] = {}
    for turn in record["turns"]:
        by_segment.setdefault(turn.get("segment", 0), []).append(turn)
    result = []
    for turns in by_segment.values():
        returns = tuple(
            protocols.CausalState(
                turn.get("tool") or NO_TOOL,
                turn["payload_tokens"],
                turn.get("status") or "success",
                turn.get("call") or "",
                turn.get("error") or "",
            )
            for turn in turns[:-1]
        )
        generated = tuple(turn["generated_tokens"] for turn in turns)
        result.append(RecordedRollout(record["prompt_id"], step if isinstance(step, int) else None, generated, returns))
    return result


def measure(
    rollouts: Collection[RecordedRollout], config: config_lib.SchedulerConfig | None = None
) -> PredictionQuality | None:
    """Judges the evidence on the rollouts of one run; None if no tool ever returned.

    Args:
      rollouts: rollouts in the order in which they were trained.
      config: the scheduler's settings; None takes the defaults.
    """
    tokens_left: dict[paths.Key, list[int]] = collections.defaultdict(list)
    for one in rollouts:
        for state, remaining in zip(one.returns, _remaining(one), strict=True):
            tokens_left[paths.causal_key(state)].append(remaining)
    if not tokens_left:
        return None
    every = sorted(itertools.chain.from_iterable(tokens_left.values()))
    ranks = (len(every) * part // BUCKETS for part in range(1, BUCKETS))
    # A bound at the largest value would leave the bucket above it empty.
    judge = _PredictionJudge(tuple(sorted({every[max(0, rank - 1)] for rank in ranks} - {every[-1]})))
    config = config or config_lib.SchedulerConfig()
    candidate = evidence.Evidence(config)
    plain = evidence.Evidence(dataclasses.replace(config, evidence="mean"))
    steps = [at // STEP_TRAJECTORIES if one.step is None else one.step for at, one in enumerate(rollouts)]
    # Grouped without sorting: the file's order is the order of training, and nothing may be learnt before its time.
    by_step = itertools.groupby(zip(steps, rollouts, strict=True), key=operator.itemgetter(0))
    for number, (_, step) in enumerate(by_step):
        judge.take_step([one for _, one in step], candidate, plain, judged=number > 0)
    return judge.quality(tokens_left)


def told(size_class: int) -> str:
    """Returns the range of tokens of a payload-size class, as text."""
    low = 2 ** (paths.SMALLEST_BITS + size_class - 1)
    if size_class == paths.LARGEST_CLASS:
        return f"{low:,} and more"
    return f"{low:,} to {2 * low - 1:,}" if size_class else f"under {2 * low:,}"


class _PredictionJudge:
    """Compares predictions with the true remainders.

    Args:
      bounds: bounds of the buckets.
    """

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        size = len(bounds) + 1
        self._after: dict[paths.Key, list[int]] = collections.defaultdict(lambda: [0] * size)
        self._confusion = [[0] * size for _ in range(size)]
        self._right_by_state = 0
        self._sum = self._squares = self._errors = 0.0
        self._covered = 0
        self._saved: dict[str, list[float]] = collections.defaultdict(list)  # bits of each return, by prompt

    def take_step(
        self, step: Sequence[RecordedRollout], candidate: evidence.Evidence, plain: evidence.Evidence, *, judged: bool
    ) -> None:
        """Predicts what is left at each return of a step's rollouts, and learns from each rollout when it ends.

        Args:
          step: the rollouts.
          candidate: the evidence that is judged.
          plain: one distribution for all requests.
          judged: whether the predictions count.
        """
        tracks = [candidate.start(one.prompt_id, 0) for one in step]
        plain_tracks = [plain.start(one.prompt_id, 0) for one in step]
        marks = [list(itertools.accumulate(one.generated)) for one in step]
        # By tokens generated: rollouts of a step run side by side at one speed, so this is the order in time.
        events = ((mark, place, turn) for place, ends in enumerate(marks) for turn, mark in enumerate(ends))
        for generated, place, turn in sorted(events):
            one, track = step[place], tracks[place]
            if turn == len(one.returns):  # the last output ends the rollout
                candidate.finish(track, generated)
                plain.finish(plain_tracks[place], generated)
                for state, remaining in zip(one.returns, _remaining(one), strict=True):
                    self._after[paths.causal_key(state)][bisect.bisect_left(self._bounds, remaining)] += 1
                continue
            candidate.observe(track, one.returns[turn], generated)
            sketch, remaining = candidate.predict(track, generated), marks[place][-1] - generated
            if not judged:
                continue
            bucket = bisect.bisect_left(self._bounds, remaining)
            likely = [0.0] * (len(self._bounds) + 1)
            for tokens, mass in zip(sketch, prefix_tree.MASSES, strict=True):
                likely[bisect.bisect_left(self._bounds, tokens)] += mass
            self._confusion[bucket][likely.index(max(likely))] += 1
            # The rival knows the causal state alone; before it has seen one it names the lowest bucket.
            bucket_counts = self._after[paths.causal_key(one.returns[turn])]
            self._right_by_state += bucket == bucket_counts.index(max(bucket_counts))
            expected = sum(tokens * mass for tokens, mass in zip(sketch, prefix_tree.MASSES, strict=True))
            truth = math.log2(1.0 + remaining)
            typical = plain.predict(plain_tracks[place], generated)
            saved = loss(logs_of(typical), truth) - loss(logs_of(sketch), truth)
            self._saved[one.prompt_id].append(saved)
            self._covered += sketch[0] <= remaining <= sketch[-2]
            self._sum += remaining
            self._squares += remaining**2
            self._errors += (remaining - expected) ** 2

    def quality(self, tokens_left: Mapping[paths.Key, Sequence[int]]) -> PredictionQuality:
        """Returns the quality of all predictions, given the tokens left after each causal state."""
        # The most frequent first; equally frequent ones by name, so that a report repeats exactly.
        states = []
        for (tool, size_class, status), values in sorted(
            tokens_left.items(), key=lambda item: (-len(item[1]), item[0])
        ):
            p90 = sorted(values)[math.ceil(0.9 * len(values)) - 1]
            states.append(LabelledState(tool, size_class, status, len(values), sum(values) / len(values), p90))
        # Epsilon squared (Kelley, 1935): the share of the variance between states, estimated without bias.
        returns, total = sum(map(len, tokens_left.values())), sum(map(sum, tokens_left.values()))
        total_squares = sum(value**2 for values in tokens_left.values() for value in values) - total**2 / returns
        inside = sum(
            sum(value**2 for value in values) - sum(values) ** 2 / len(values) for values in tokens_left.values()
        )
        explained = math.nan
        if returns > len(tokens_left) and total_squares > 0:
            explained = 1.0 - (inside / (returns - len(tokens_left))) / (total_squares / (returns - 1))
        confusion, count = self._confusion, sum(map(sum, self._confusion))
        spread = self._squares - self._sum**2 / count if count else 0.0
        right = (max(map(sum, confusion)), self._right_by_state, sum(row[at] for at, row in enumerate(confusion)))
        majority, by_state, by_path = (hits / count if count else math.nan for hits in right)
        return PredictionQuality(
            states=tuple(states),
            explained=explained,
            bounds=self._bounds,
            judged=count,
            majority=majority,
            by_state=by_state,
            by_path=by_path,
            # Rounding leaves a spread of about 1e-16 of the squares where all lengths are the same.
            path_explained=1.0 - self._errors / spread if spread > 1e-9 * self._squares else math.nan,
            confusion=tuple(map(tuple, confusion)),
            bits=sum(map(sum, self._saved.values())) / count if count else math.nan,
            bits_error=self._bits_error(count),
            covered=self._covered / count if count else math.nan,
        )

    def _bits_error(self, count: int) -> float:
        """Returns the standard error of the bits saved a return; returns of one prompt are not independent."""
        saved, prompts = self._saved.values(), len(self._saved)
        if prompts < 2:
            return math.nan
        mean = sum(map(sum, saved)) / count
        squares = sum((sum(bits) - mean * len(bits)) ** 2 for bits in saved)
        return math.sqrt(prompts / (prompts - 1) * squares) / count


def _remaining(one: RecordedRollout) -> list[int]:
    """Returns the tokens left after each return."""
    return list(itertools.accumulate(reversed(one.generated[1:])))[::-1]


def logs_of(sketch: prefix_tree.Sketch) -> prefix_tree.Sketch:
    """Returns log2(1 + tokens) of each quantile."""
    log = math.log2
    return tuple([log(1.0 + tokens) for tokens in sketch])


def below(logs: Sequence[float], log: float) -> float:
    """Returns the probability that a prediction gives to this length and to all below.

    Args:
      logs: quantiles at `prefix_tree.LEVELS`, as logarithms.
      log: the logarithm of the length.
    """
    levels = prefix_tree.LEVELS
    place = bisect.bisect_right(logs, log)
    if place == 0:
        scale = (logs[2] - logs[0]) / LOWER_RANGE
        return levels[0] * math.exp((log - logs[0]) / (scale if scale > NARROWEST_TAIL else NARROWEST_TAIL))
    if place == len(levels):
        scale = (logs[-1] - logs[3]) / UPPER_RANGE
        tail = math.exp((logs[-1] - log) / (scale if scale > NARROWEST_TAIL else NARROWEST_TAIL))
        return 1.0 - (1.0 - levels[-1]) * tail
    low, start = levels[place - 1], logs[place - 1]
    return low + (levels[place] - low) * (log - start) / (logs[place] - start)


def loss(logs: Sequence[float], truth: float) -> float:
    """Returns the loss of a prediction in bits, given the logarithm of the true length.

    It is minus the base-2 logarithm of the probability that the prediction gave to lengths within `NEAR` octaves: a log
    score of a fixed resolution, so that certainty beyond 19% earns nothing. Octaves are those of 1 + tokens. Between
    two quantiles the probability is uniform, beyond the outer ones exponential. A little lies everywhere, so that no
    surprise costs more than about ten bits.
    """
    near = below(logs, truth + NEAR) - below(logs, truth - NEAR)
    return -math.log2((1.0 - OUTSIDE) * near + OUTSIDE * 2.0 * NEAR / OCTAVES)
