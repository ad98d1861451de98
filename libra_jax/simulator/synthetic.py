"""Synthetic workloads, shaped like the figures that Libra's authors publish of theirs (arXiv 2606.03077).

* `swe`, software engineering. Published: the mean of generated tokens drifts from 2.5k to 11.5k over a run. The longest
  tenth of a batch takes more than half of its rollout time. Tool returns of about 1k tokens lead to trajectories of
  under 8k, returns of 12.5k to about 21k, and repeated failures to more than 40k.
* `search`. Published: short trajectories, and 91% of requests sent to the right bucket at their first tool return.
* `math`. Published: long outputs without tools. Nothing tells a long output from a short one before it ends.

A trajectory's length is mostly drawn for each sample, and only weakly for its prompt. So siblings differ nearly as
much as strangers, and only the tool returns tell them apart. `variation` widens or narrows that difference. A script
is a pure function of (seed, task index, sample): the same numbers on every machine, in any order of calls.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from libra_jax import protocols
from libra_jax.simulator import scripts

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
    place, kind = draw.share_below(), PLAIN
    shares = [_between(other.share, progress) for other in (PLAIN, LARGE, FAILING)]
    if place > shares[0]:
        kind = LARGE if place < shares[0] + shares[1] else FAILING
    factor = min(draw.factor(0.15 * kind.spread, 0.35 * kind.spread), FAR_TAIL if kind is FAILING else 3.0)
    total = max(60, round(_between(kind.tokens, progress) * factor))
    count = max(3, round(total / kind.turn_tokens))
    generated = _split(total, count, draw.sample)
    turns = [_swe_turn(tokens, draw.sample) for tokens in generated[:-1]]
    _mark(turns, kind, draw.sample)
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


SHAPES: dict[str, Callable[[_Draw, float], scripts.Script]] = {"swe": swe, "search": search, "math": mathematics}


@dataclass(frozen=True)
class Synthetic:
    """A synthetic `scripts.Workload`.

    Attributes:
      shape: one of `SHAPES`.
      seed: seed of every draw.
      tasks: prompts that the whole run is planned to train; the drift of `swe` spreads over them.
      variation: width of the difference between siblings, relative to the shape's own.
    """

    shape: str
    seed: int
    tasks: int
    variation: float = 1.0

    def script(self, task_index: int, sample: int) -> scripts.Script:
        """Returns the script of one rollout; see `scripts.Workload`."""
        # Seeded by text: Python hashes it the same way on every machine, and siblings share the prompt's numbers.
        name = f"{self.shape}/{self.seed}/{task_index}"
        draw = _Draw(random.Random(name), random.Random(f"{name}/{sample}"), self.variation)
        return SHAPES[self.shape](draw, min(1.0, task_index / max(1, self.tasks - 1)))


def _between(ends: tuple[float, float], progress: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * progress


def _log_normal(rng: random.Random, median: float, spread: float, most: int) -> int:
    return min(most, max(1, round(median * math.exp(rng.gauss(0.0, spread)))))


def _seconds(rng: random.Random, median: float, most: float) -> float:
    return round(min(most, median * math.exp(rng.gauss(0.0, 1.2))), 3)


def _split(total: int, count: int, rng: random.Random) -> list[int]:
    """Splits `total` into `count` parts of at least 1 each, unevenly (gamma-distributed weights of shape 2)."""
    weights = [rng.gammavariate(2.0, 1.0) for _ in range(count)]
    scale = (total - count) / sum(weights)
    parts = [1 + int(weight * scale) for weight in weights]
    parts[-1] += total - sum(parts)
    return parts


def _swe_turn(generated: int, rng: random.Random) -> protocols.Turn:
    """Returns a tool call that mostly succeeds and returns about 1k tokens."""
    tool = rng.choices(("bash", "read", "edit"), (5, 3, 2))[0]
    status: protocols.ToolStatus = "failure" if rng.random() < 0.1 else "success"
    payload = _log_normal(rng, 150 if tool == "edit" else 1_000, 0.5, 6_000)
    return protocols.Turn(generated, tool, status, payload, _seconds(rng, 1.5, 300.0))


def _mark(turns: list[protocols.Turn], kind: Kind, rng: random.Random) -> None:
    """Puts the sign of the kind into the tool returns: one very large return, or repeated failures."""
    first = rng.choices((0, 1, 2), (0.7, 0.2, 0.1))[0]
    # A few plain rollouts get a large return too, so that the sign is not perfect.
    if kind is LARGE or (kind is PLAIN and rng.random() < 0.02):
        turn = turns[min(first, len(turns) - 1)]
        turn.tool, turn.status = "read", "success"
        turn.payload_tokens = _log_normal(rng, LARGE_RETURN_TOKENS, 0.15, 25_000)
    if kind is not FAILING:
        return
    for turn in turns[first:]:
        if rng.random() < 0.75:
            turn.tool, turn.status, turn.payload_tokens = "bash", "failure", _log_normal(rng, 600, 0.4, 3_000)
            if rng.random() < TIMEOUT_SHARE:
                turn.status, turn.payload_tokens, turn.tool_seconds = "timeout", 20, 120.0
