"""Trace replay: recorded trajectories as a workload, in groups.

A task is a prompt of the trace. Its first samples are the prompt's recorded trajectories, turn by turn. Further
siblings are made from them. The whole rollout gets longer or shorter by a log-normal factor of mean 1. The factor is
split between the number of turns and the tokens of each turn. A longer sibling tries again more often: its added
turns repeat a recorded turn, and half of them fail. A repeated turn belongs to the same segment of its rollout, so a
longer sibling has longer segments, and not more of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Sequence
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
    turn_fields = {item.name for item in dataclasses.fields(protocols.Turn)} - {"moves"}
    rows = []
    for number, record in enumerate(trace.read(path), start=1):
        if not any(turn["generated_tokens"] for turn in record["turns"]):
            raise protocols.DataError(
                f"{path}, trajectory {number} ({record['trajectory_id']}): no turn generates a token; remove the line"
            )
        turns = tuple(
            protocols.Turn(**{name: value for name, value in turn.items() if name in turn_fields})
            for turn in record["turns"]
        )
        # Other ends, such as an answer, follow from the script; a limit of the recorded run would not.
        finish = record.get("finish")
        limit = finish if finish in protocols.LIMITS else None
        further = tuple(
            scripts.ScriptedSegment(
                segment["parent"],
                segment["shared_tokens"],
                # A context of no token at all could not be continued.
                segment["prompt_tokens"] or int(not segment["shared_tokens"]),
            )
            for segment in record.get("segments", ())[1:]
        )
        places = tuple(turn.get("segment", 0) for turn in record["turns"]) if further else ()
        prompt_tokens = max(1, record["prompt_tokens"])
        rows.append((record["prompt_id"], scripts.Script(prompt_tokens, turns, limit, further, places)))
    return rows


@dataclasses.dataclass(frozen=True)
class RecordedWorkload:
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
        epoch, position = divmod(task_index, len(self.prompts))
        if self.shuffle:
            position = _order(len(self.prompts), f"{self.seed}/{epoch}")[position]
        recorded = self.prompts[position]
        # What was recorded is replayed as it was; only siblings that no one recorded are made up.
        if sample < len(recorded) or self.sigma == 0:
            return recorded[sample % len(recorded)]
        rng = random.Random(f"{self.seed}/{task_index}/{sample}")
        return sibling(recorded[sample % len(recorded)], self.sigma, self.max_context, rng)


PARTS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
"""Parts of a trace's prompts, so that what was chosen on one part can be judged on the other."""


def load(
    path: Path, *, seed: int, sigma: float, max_context: int, shuffle: bool = True, part: str = "all"
) -> RecordedWorkload:
    """Returns a replay of the trace at `path`; trajectories of one prompt become siblings.

    Args:
      part: prompts that are replayed, one of `PARTS`, counted in the order of the file.

    Raises:
      DataError: as for `read`, or no prompt is left.
    """
    prompts: dict[str, list[scripts.Script]] = {}
    for prompt_id, script in read(path):
        prompts.setdefault(prompt_id, []).append(script)
    chosen = list(prompts.values())[PARTS[part]]
    if not chosen:
        raise protocols.DataError(f"{path}: its {part} prompts are none; it has {len(prompts)} in all")
    return RecordedWorkload(tuple(tuple(group) for group in chosen), seed, sigma, max_context, shuffle)


def sibling(script: scripts.Script, sigma: float, max_context: int, rng: random.Random) -> scripts.Script:
    """Returns another rollout of the prompt of `script`, varied by `sigma`, with a context of at most `max_context`.

    Segments keep their order, and the length of a segment follows its turns. A segment that loses all its turns is
    left out, unless another one begins with its context.
    """
    factor = math.exp(sigma * rng.gauss(0.0, 1.0) - sigma**2 / 2.0)  # of mean 1
    turn_factor, token_factor = factor**TURN_SHARE, factor ** (1.0 - TURN_SHARE)
    *before, last = zip(script.turns, script.places or (0,) * len(script.turns), strict=True)
    turn_count = max(0, round(len(script.turns) * turn_factor) - 1)
    turns: list[tuple[protocols.Turn, int]] = []
    if turn_count <= len(before):
        turns = [before[index] for index in sorted(rng.sample(range(len(before)), turn_count))] if before else []
    elif before:
        # Too few turns: some are repeated, and half of the repeats fail.
        again = [0] * len(before)
        for _ in range(turn_count - len(before)):
            again[rng.randrange(len(before))] += 1
        for (turn, place), times in zip(before, again, strict=True):
            turns.append((turn, place))
            for _ in range(times):
                failed = turn.tool is not None and rng.random() < 0.5
                turns.append((dataclasses.replace(turn, status="failure") if failed else turn, place))
    varied, turn_sigma = [], sigma * TURN_SIGMA
    for turn, place in (*turns, last):
        jitter = math.exp(turn_sigma * rng.gauss(0.0, 1.0) - turn_sigma**2 / 2.0)
        generated = max(1, round(turn.generated_tokens * token_factor * jitter))
        seconds = round(turn.tool_seconds * jitter, 6)
        varied.append((dataclasses.replace(turn, generated_tokens=generated, tool_seconds=seconds), place))
    return _fitting(script, varied, max_context)


def _fitting(script: scripts.Script, turns: Sequence[tuple[protocols.Turn, int]], max_context: int) -> scripts.Script:
    """Returns the script with these turns instead, each with its segment, and no context above `max_context`.

    The last turn is kept in any case; earlier turns of its segment are cut to make room. A segment shares no more
    than its parent has left.
    """
    *before, (last, place_of_last) = turns
    segments_by_place: dict[int, scripts.ScriptedSegment] = {}
    contexts = {0: script.prompt_tokens}
    fitting_turns: list[tuple[protocols.Turn, int]] = []
    full: set[int] = set()

    def begin(place: int) -> None:
        """Begins a segment, and the one whose context it begins with."""
        if place in contexts:
            return
        segment = script.segments[place - 1]
        if segment.parent is not None:
            begin(segment.parent)
            shared = min(segment.shared_tokens, contexts[segment.parent])
            # The tokens that its parent lost are its own now: the child begins with as long a context as before.
            prompt_tokens = segment.prompt_tokens + segment.shared_tokens - shared
            segment = dataclasses.replace(segment, shared_tokens=shared, prompt_tokens=prompt_tokens)
        segments_by_place[place] = segment
        contexts[place] = segment.shared_tokens + segment.prompt_tokens

    for turn, place in before:
        begin(place)
        # Without room for one more turn a segment ends, and those that begin later go on.
        after = contexts[place] + turn.generated_tokens + turn.payload_tokens
        if place in full or after + (last.generated_tokens if place == place_of_last else 0) >= max_context:
            full.add(place)
            continue
        contexts[place] = after
        fitting_turns.append((turn, place))
    begin(place_of_last)
    fitting_turns.append((last, place_of_last))
    if not script.segments:
        return scripts.Script(script.prompt_tokens, tuple(turn for turn, _ in fitting_turns))
    # Segments are numbered by their place in the list, so those that never began leave no gap.
    numbers = {0: 0, **{place: number for number, place in enumerate(sorted(segments_by_place), start=1)}}
    segments = tuple(
        dataclasses.replace(segments_by_place[place], parent=None if parent is None else numbers[parent])
        for place in sorted(segments_by_place)
        for parent in (segments_by_place[place].parent,)
    )
    places = tuple(numbers[place] for _, place in fitting_turns)
    return scripts.Script(
        script.prompt_tokens, tuple(turn for turn, _ in fitting_turns), None, segments, places if segments else ()
    )


# Cached, because each script is asked for alone, and a shuffle costs the whole order.
@functools.lru_cache(maxsize=8)
def _order(count: int, name: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(name).shuffle(order)
    return tuple(order)
