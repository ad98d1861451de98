"""Trace replay: recorded trajectories as a workload, in groups.

A task is a prompt of the trace. Its first samples are the prompt's recorded trajectories, turn by turn. Further
siblings are made from them. The whole rollout gets longer or shorter by a log-normal factor of mean 1. The factor is
split between the number of turns and the tokens of each turn. A longer sibling tries again more often: its added
turns repeat a recorded turn, and half of them fail.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from pathlib import Path

from libra_jax import protocols
from libra_jax.simulator import scripts
from libra_jax.telemetry import trace

WITHIN_PROMPT_SIGMA = 0.6
"""Default standard deviation of the logarithm of a sibling's length. In the AgentCgroup measurements (144
software-engineering tasks) the two rollouts of one task, by two different models, differ by about 1.5; siblings of
one model differ less."""

TURN_SHARE = 0.7
"""Share of the factor's logarithm that goes into the number of turns."""

TURN_SIGMA = 0.25
"""Spread of a single turn's tokens and seconds, as a share of sigma."""


def read(path: Path) -> list[tuple[str, scripts.Script]]:
    """Reads a trace (`telemetry/trace.py`): prompt id and script of each trajectory, in the file's order.

    Raises:
      DataError: the file is missing, empty or malformed, or a trajectory in it generates nothing; the message names
        file and line.
    """
    # The moves of the recorded run are no part of the work: the simulated scheduler decides on its own.
    known = {item.name for item in dataclasses.fields(protocols.Turn)} - {"moves"}
    rows = []
    for number, record in enumerate(trace.read(path), start=1):
        if not any(turn["generated_tokens"] for turn in record["turns"]):
            raise protocols.DataError(
                f"{path}, trajectory {number} ({record['trajectory_id']}): no turn generates a token; remove the line"
            )
        turns = tuple(
            protocols.Turn(**{name: value for name, value in turn.items() if name in known}) for turn in record["turns"]
        )
        # Other ends, such as an answer, follow from the script; a limit of the recorded run would not.
        finish = record.get("finish")
        limit = finish if finish in protocols.LIMITS else None
        rows.append((record["prompt_id"], scripts.Script(max(1, record["prompt_tokens"]), turns, limit)))
    return rows


@dataclasses.dataclass(frozen=True)
class Replay:
    """A `scripts.Workload` over recorded trajectories.

    Attributes:
      prompts: the recorded scripts of each prompt.
      seed: seed of the order of prompts and of every draw.
      sigma: width of the difference between siblings (standard deviation of the logarithm of their length).
      max_context: longest context of a made sibling; a recorded trajectory is replayed unchanged.
      shuffle: draws a new order of prompts for each pass; False keeps the trace's order.
    """

    prompts: tuple[tuple[scripts.Script, ...], ...]
    seed: int
    sigma: float
    max_context: int
    shuffle: bool = True

    def script(self, task_index: int, sample: int) -> scripts.Script:
        """Returns the script of one rollout; see `scripts.Workload`."""
        epoch, position = divmod(task_index, len(self.prompts))
        if self.shuffle:
            position = _order(len(self.prompts), f"{self.seed}/{epoch}")[position]
        recorded = self.prompts[position]
        # What was recorded is replayed as it was; only siblings that nobody recorded are made up.
        if sample < len(recorded) or self.sigma == 0:
            return recorded[sample % len(recorded)]
        rng = random.Random(f"{self.seed}/{task_index}/{sample}")
        return sibling(recorded[sample % len(recorded)], self.sigma, self.max_context, rng)


def load(path: Path, *, seed: int, sigma: float, max_context: int, shuffle: bool = True) -> Replay:
    """Returns a replay of the trace at `path`; trajectories of one prompt become siblings.

    Raises:
      DataError: as for `read`.
    """
    prompts: dict[str, list[scripts.Script]] = {}
    for prompt_id, script in read(path):
        prompts.setdefault(prompt_id, []).append(script)
    return Replay(tuple(tuple(group) for group in prompts.values()), seed, sigma, max_context, shuffle)


def sibling(script: scripts.Script, sigma: float, max_context: int, rng: random.Random) -> scripts.Script:
    """Returns another rollout of the prompt of `script`, varied by `sigma`, with a context of at most `max_context`."""
    factor = math.exp(sigma * rng.gauss(0.0, 1.0) - sigma**2 / 2.0)  # of mean 1
    turn_factor, token_factor = factor**TURN_SHARE, factor ** (1.0 - TURN_SHARE)
    *before, last = script.turns
    wanted = max(0, round(len(script.turns) * turn_factor) - 1)
    turns: list[protocols.Turn] = []
    if wanted <= len(before):
        turns = [before[index] for index in sorted(rng.sample(range(len(before)), wanted))] if before else []
    elif before:
        # Too few turns: some are repeated, and half of the repeats fail.
        again = [0] * len(before)
        for _ in range(wanted - len(before)):
            again[rng.randrange(len(before))] += 1
        for turn, times in zip(before, again, strict=True):
            turns.append(turn)
            for _ in range(times):
                failed = turn.tool is not None and rng.random() < 0.5
                turns.append(dataclasses.replace(turn, status="failure") if failed else turn)
    varied, each = [], sigma * TURN_SIGMA
    for turn in (*turns, last):
        jitter = math.exp(each * rng.gauss(0.0, 1.0) - each**2 / 2.0)
        generated = max(1, round(turn.generated_tokens * token_factor * jitter))
        seconds = round(turn.tool_seconds * jitter, 6)
        varied.append(dataclasses.replace(turn, generated_tokens=generated, tool_seconds=seconds))
    *varied, last = varied
    # The last turn is kept in any case; earlier turns are cut to make room.
    room = max_context - script.prompt_tokens - last.generated_tokens
    kept = []
    for turn in varied:
        room -= turn.generated_tokens + turn.payload_tokens
        if room <= 0:
            break
        kept.append(turn)
    return scripts.Script(script.prompt_tokens, (*kept, last))


# Cached, because each script is asked for alone, and a shuffle costs the whole order.
@functools.lru_cache(maxsize=8)
def _order(count: int, name: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(name).shuffle(order)
    return tuple(order)
