"""Samples: some rollouts of each step as text, so that a person can read what the policy wrote.

The text is decoded from the tokens of finished rollouts, with special tokens spelled out. It is never used for
training, which uses the sampled tokens themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols

MOST_TOKENS = 16_384
"""Largest number of tokens of a text that is written out. The middle of a longer text is cut, with a mark."""


@dataclass(frozen=True)
class Samples:
    """Chooses rollouts of a step and writes them as the records of `samples.jsonl`.

    Attributes:
      count: Number of rollouts per step and per evaluation. 0 saves none.
      seed: Seed that orders rollouts of equal reward.
      tokenizer: Tokenizer of the policy.
    """

    count: int
    seed: int
    tokenizer: protocols.Tokenizer

    def of_step(self, step: int, groups: Sequence[protocols.Group]) -> list[dict[str, Any]]:
        """Returns records of the rollouts that a training step trained on, best first."""
        rollouts = [trajectory for group in groups for trajectory in group.rollouts]
        group_of = {trajectory.trajectory_id: group for group in groups for trajectory in group.rollouts}
        records = []
        for rank, trajectory in choose(rollouts, self.count, self.seed):
            group = group_of[trajectory.trajectory_id]
            identity = {"step": step, "evaluation": False, "policy_version": group.dispatch_version}
            identity |= {"group_id": group.group_id, "rank": rank, "of": len(rollouts)}
            records.append(identity | self._record(trajectory))
        return records

    def of_evaluation(self, version: int, rollouts: Sequence[protocols.Trajectory]) -> list[dict[str, Any]]:
        """Returns records of the scored rollouts of an evaluation, best first. The version is that of the policy."""
        identity = {"step": version, "evaluation": True, "policy_version": version, "group_id": None}
        return [
            identity | {"rank": rank, "of": len(rollouts)} | self._record(trajectory)
            for rank, trajectory in choose(rollouts, self.count, self.seed)
        ]

    def _record(self, trajectory: protocols.Trajectory) -> dict[str, Any]:
        prompt, turns = "", []
        for segment in trajectory.segments:
            pieces = self._pieces(segment)
            turn_iterator = iter(segment.turns)
            for place, (source, text) in enumerate(pieces):
                if source != protocols.TokenSource.MODEL:
                    continue
                # Tool tokens follow every output except the last.
                answered = place + 1 < len(pieces) and pieces[place + 1][0] == protocols.TokenSource.TOOL
                turn = next(turn_iterator, protocols.Turn(generated_tokens=0))
                turns.append(
                    {
                        "text": text,
                        "generated_tokens": turn.generated_tokens,
                        "tool": turn.tool,
                        "status": turn.status,
                        "tool_seconds": turn.tool_seconds,
                        "returned": pieces[place + 1][1] if answered else "",
                        **({"segment": segment.index} if trajectory.branches else {}),
                    }
                )
            begins = "".join(text for source, text in pieces if source == protocols.TokenSource.PROMPT)
            # Of a further segment, only the text that is its own.
            prompt += begins if segment.index == 0 else f"\n[segment {segment.index}]\n{begins}" if begins else ""
        # Tokens of prompts and tools have no version.
        versions = [
            version
            for segment in trajectory.segments
            for version in segment.policy_versions
            if version != protocols.NO_VERSION
        ]
        parts = {key: value for key, value in trajectory.metrics.items() if key.startswith("reward/")}
        return {
            "trajectory_id": trajectory.trajectory_id,
            "prompt_id": trajectory.prompt_id,
            "reward": trajectory.reward,
            "reward_parts": {key.removeprefix("reward/"): value for key, value in parts.items()},
            "finish": trajectory.finish,
            "token_versions": [min(versions), max(versions)] if versions else [],
            "prompt": prompt,
            "turns": turns,
        }

    def _pieces(self, segment: protocols.Segment) -> list[tuple[int, str]]:
        """Returns the source and the text of each run of tokens of one source, in order."""
        pieces: list[tuple[int, str]] = []
        for source, start, end in segment.runs():
            tokens = segment.token_ids[start:end]
            if len(tokens) <= MOST_TOKENS:
                text = self.tokenizer.decode(tokens)
            else:
                # Cut in tokens before decoding, because decoding a huge output would hold up the event loop.
                half = MOST_TOKENS // 2
                head, tail = self.tokenizer.decode(tokens[:half]), self.tokenizer.decode(tokens[-half:])
                text = f"{head}\n[... {len(tokens) - 2 * half:,} tokens left out ...]\n{tail}"
            pieces.append((source, text))
        return pieces


def choose(rollouts: Sequence[protocols.Trajectory], count: int, seed: int) -> list[tuple[int, protocols.Trajectory]]:
    """Returns the best, the worst, and rollouts evenly between them by reward, with their ranks (1 is the best).

    The choice depends only on rewards, ids and the seed, so a repeated step chooses the same rollouts.

    A count of 1 chooses the best alone. Rollouts without a reward rank last.
    """

    def order(trajectory: protocols.Trajectory) -> tuple[float, int, str]:
        reward = float("-inf") if trajectory.reward is None else trajectory.reward
        name = trajectory.trajectory_id
        # A checksum and not `hash`, which differs between processes.
        return -reward, zlib.crc32(f"{seed} {name}".encode()), name

    ranked = sorted(rollouts, key=order)
    count = min(count, len(ranked))
    # Evenly spaced ranks include the first and the last.
    places = [round(place * (len(ranked) - 1) / max(1, count - 1)) for place in range(count)]
    return [(place + 1, ranked[place]) for place in places]
