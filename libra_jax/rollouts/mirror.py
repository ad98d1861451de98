"""Keeps a copy of a rollout in another process: updates with what is new, and their application to the copy."""

from __future__ import annotations

import dataclasses

from libra_jax import protocols

MIRRORED = tuple(name for name in protocols.COLUMNS if name != "teacher_log_probs")
"""Columns that updates carry. A teacher scores a rollout after its end, where the copy is."""


@dataclasses.dataclass
class _SentSegment:
    """What updates have carried of a segment."""

    segment: protocols.Segment
    revision: int
    tokens: int = 0
    routed: int = 0
    turns: int = 0


class Tracker:
    """Makes the updates of one rollout.

    Args:
      trajectory: the rollout, with what the copy has already.
      ahead: seconds by which the copy's clock is ahead of this process's.
    """

    def __init__(self, trajectory: protocols.Trajectory, ahead: float = 0.0) -> None:
        self._trajectory = trajectory
        self._ahead = ahead
        self._sent = [
            _SentSegment(segment, segment.revision, len(segment.token_ids), len(segment.routing), len(segment.turns))
            for segment in trajectory.segments
        ]

    def update(self, *, last: bool = False) -> protocols.RolloutUpdate:
        """Returns what is new since the update before. `last`: carries all turns, which may have changed."""
        trajectory = self._trajectory
        del self._sent[len(trajectory.segments) :]
        changed = []
        for segment in trajectory.segments:
            # Another segment may have taken the number of one that was dropped.
            if segment.index == len(self._sent) or self._sent[segment.index].segment is not segment:
                self._sent[segment.index :] = [_SentSegment(segment, segment.revision)]
            if (update := self._segment(segment, self._sent[segment.index], last)) is not None:
                changed.append(update)
        return protocols.RolloutUpdate(
            trajectory_id=trajectory.trajectory_id,
            segments=changed,
            count=len(trajectory.segments),
            finish=trajectory.finish,
            metrics=dict(trajectory.metrics),
            start_seconds=trajectory.start_seconds + self._ahead,
            seconds=trajectory.seconds,
            snapshot=trajectory.snapshot,
            environment_reward=trajectory.environment_reward,
        )

    def _segment(self, segment: protocols.Segment, sent: _SentSegment, last: bool) -> protocols.SegmentUpdate | None:
        if segment.revision != sent.revision:
            sent.revision, sent.tokens, sent.routed, sent.turns = segment.revision, 0, 0, 0
        # The tool, its status and its seconds are filled in after a turn was sent.
        turns_kept = 0 if last else max(0, min(sent.turns, len(segment.turns)) - 1)
        if not last and sent.tokens == len(segment.token_ids) and sent.turns == len(segment.turns) and sent.tokens:
            return None
        update = protocols.SegmentUpdate(
            index=segment.index,
            parent=None if segment.parent is None else segment.parent.index,
            shared=segment.shared,
            kept=sent.tokens,
            columns={name: getattr(segment, name)[sent.tokens :] for name in MIRRORED},
            routed=sent.routed,
            routing=tuple(segment.routing[sent.routed :]),
            turns_kept=turns_kept,
            turns=[
                dataclasses.replace(turn, start_seconds=turn.start_seconds + self._ahead)
                for turn in segment.turns[turns_kept:]
            ],
            reward=segment.reward,
        )
        sent.tokens, sent.routed, sent.turns = len(segment.token_ids), len(segment.routing), len(segment.turns)
        return update


def apply(trajectory: protocols.Trajectory, update: protocols.RolloutUpdate) -> None:
    """Brings a copy to the state of the rollout at the update."""
    del trajectory.branches[update.count - 1 :]
    for segment_update in update.segments:
        if segment_update.index == len(trajectory.segments):
            new_segment = protocols.Segment(trajectory.trajectory_id, trajectory.prompt_id, index=segment_update.index)
            trajectory.branches.append(new_segment)
        segment = trajectory.segments[segment_update.index]
        segment.parent = None if segment_update.parent is None else trajectory.segments[segment_update.parent]
        segment.shared, segment.reward = segment_update.shared, segment_update.reward
        segment.cut(segment_update.kept)
        for name, values in segment_update.columns.items():
            getattr(segment, name).extend(values)
        segment.routing[segment_update.routed :] = segment_update.routing
        segment.turns[segment_update.turns_kept :] = segment_update.turns
    trajectory.finish = update.finish
    trajectory.metrics.clear()
    trajectory.metrics.update(update.metrics)
    trajectory.start_seconds, trajectory.seconds = update.start_seconds, update.seconds
    trajectory.snapshot, trajectory.environment_reward = update.snapshot, update.environment_reward
