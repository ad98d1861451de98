"""Groups and trajectories as plain JSON values, for checkpoints and stored successes.

Columns are packed binary: spelling out millions of floats would stall the event loop.
"""

from __future__ import annotations

import array
import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NotRequired, TypedDict, cast

from libra_jax import protocols


@dataclass(frozen=True)
class RoutingRecord:
    """Experts of a trajectory's routed tokens, as they were when the checkpoint began (`Trajectory.routing`)."""

    rows: tuple[bytes, ...]


class RoutingPlace(TypedDict):
    """Place of a trajectory's experts in the file of all of them, in bytes."""

    first: int
    nbytes: int
    tokens: int


class PartialSegmentRecord(TypedDict):
    """A segment, finished or cut off anywhere. Columns are base64 of their arrays (`protocols.Segment`).

    `routing` is missing if no token is routed. In coordinator.json it is a `RoutingPlace`.
    """

    token_ids: str
    sources: str
    loss_mask: str
    log_probs: str
    policy_versions: str
    routing: NotRequired[RoutingRecord]
    teacher_log_probs: NotRequired[str]
    trajectory_id: str
    prompt_id: str
    turns: list[dict[str, Any]]
    reward: float | None


class BranchRecord(PartialSegmentRecord):
    """A segment after the first one of its rollout."""

    index: int
    parent: int | None
    shared: int


class TrajectoryRecord(PartialSegmentRecord):
    """A trajectory, finished or cut off anywhere: its first segment, and `branches` if there are more."""

    replayed: NotRequired[bool]
    branches: NotRequired[list[BranchRecord]]
    environment_reward: float | None
    finish: str | None
    metrics: dict[str, float]
    start_seconds: float
    seconds: float
    snapshot: dict[str, Any] | None


class GroupRecord(TypedDict):
    """A group that is finished or in flight. It has one trajectory for each rollout, begun or not, and so its size."""

    group_id: int
    prompt_id: str
    repeats: NotRequired[str]
    payload: dict[str, Any]
    dispatch_version: int
    trajectories: list[TrajectoryRecord]
    replay: NotRequired[TrajectoryRecord]


def encode_trajectory(trajectory: protocols.Trajectory) -> TrajectoryRecord:
    """Encodes a trajectory as plain JSON values, save for the `RoutingRecord` of its segments."""
    record: TrajectoryRecord = {
        **_encode_segment(trajectory),
        "environment_reward": trajectory.environment_reward,
        "finish": trajectory.finish,
        "metrics": dict(trajectory.metrics),
        "start_seconds": trajectory.start_seconds,
        "seconds": trajectory.seconds,
        "snapshot": asdict(trajectory.snapshot) if trajectory.snapshot is not None else None,
    }
    if trajectory.replayed:
        record["replayed"] = True
    if trajectory.branches:
        record["branches"] = [
            {
                **_encode_segment(segment),
                "index": segment.index,
                "parent": segment.parent.index if segment.parent is not None else None,
                "shared": segment.shared,
            }
            for segment in trajectory.branches
        ]
    return record


def _encode_segment(segment: protocols.Segment) -> PartialSegmentRecord:
    record: PartialSegmentRecord = {
        "token_ids": _pack(segment.token_ids),
        "sources": _pack(segment.sources),
        "loss_mask": _pack(segment.loss_mask),
        "log_probs": _pack(segment.log_probs),
        "policy_versions": _pack(segment.policy_versions),
        "trajectory_id": segment.trajectory_id,
        "prompt_id": segment.prompt_id,
        "turns": [{**vars(turn), "moves": [move._asdict() for move in turn.moves]} for turn in segment.turns],
        "reward": segment.reward,
    }
    if segment.routing:
        # References only: the bytes are joined where the checkpoint is written, off the event loop.
        record["routing"] = RoutingRecord(tuple(segment.routing))
    if segment.teacher_log_probs:
        record["teacher_log_probs"] = _pack(segment.teacher_log_probs)
    return record


def decode_trajectory(record: TrajectoryRecord) -> protocols.Trajectory:
    """Decodes a trajectory from the result of `encode_trajectory`."""
    snapshot = record.get("snapshot")
    if snapshot is not None:
        messages = tuple(_decode_message(message) for message in snapshot["messages"])
        restored = protocols.RolloutSnapshot(**{**snapshot, "messages": messages})
    trajectory = protocols.Trajectory(
        **vars(_decode_segment(record)),
        # Earlier versions did not write all fields.
        environment_reward=record.get("environment_reward"),
        finish=record["finish"],
        metrics=record["metrics"],
        start_seconds=record["start_seconds"],
        seconds=record.get("seconds", 0.0),
        snapshot=restored if snapshot is not None else None,
        replayed=record.get("replayed", False),
    )
    for branch in record.get("branches", ()):
        segment = _decode_segment(branch)
        segment.index, segment.shared = branch["index"], branch["shared"]
        # A parent comes before its children.
        segment.parent = trajectory.segments[branch["parent"]] if branch["parent"] is not None else None
        trajectory.branches.append(segment)
    return trajectory


def _decode_segment(record: PartialSegmentRecord) -> protocols.Segment:
    turns = []
    for turn in record["turns"]:
        moves = tuple(
            protocols.Move(**{**move, "reason": protocols.MoveReason(move["reason"])}) for move in turn.get("moves", ())
        )
        turns.append(protocols.Turn(**{**turn, "moves": moves}))
    return protocols.Segment(
        trajectory_id=record["trajectory_id"],
        prompt_id=record["prompt_id"],
        token_ids=_unpack("token_ids", record),
        sources=_unpack("sources", record),
        loss_mask=_unpack("loss_mask", record),
        log_probs=_unpack("log_probs", record),
        policy_versions=_unpack("policy_versions", record),
        teacher_log_probs=_unpack("teacher_log_probs", record),
        routing=list(record.get("routing", RoutingRecord(())).rows),
        turns=turns,
        reward=record["reward"],
    )


def _decode_message(record: Mapping[str, Any]) -> protocols.Message:
    calls = tuple(protocols.ToolCall(**call) for call in record.get("tool_calls", ()))
    return protocols.Message(**{**record, "tool_calls": calls})


def encode_group(group: protocols.Group) -> GroupRecord:
    """Encodes a finished or running group as plain JSON values, save for the `RoutingRecord` of its trajectories."""
    record: GroupRecord = {
        "group_id": group.group_id,
        "prompt_id": group.task.prompt_id,
        "repeats": group.task.repeats,
        "payload": dict(group.task.payload),
        "dispatch_version": group.dispatch_version,
        "trajectories": [encode_trajectory(trajectory) for trajectory in group.trajectories],
    }
    if group.replay is not None:
        record["replay"] = encode_trajectory(group.replay)
    return record


def decode_group(record: GroupRecord) -> protocols.Group:
    """Decodes a group from the result of `encode_group`."""
    return protocols.Group(
        group_id=record["group_id"],
        task=protocols.Task(record["prompt_id"], record["payload"], record.get("repeats", "")),
        dispatch_version=record["dispatch_version"],
        trajectories=[decode_trajectory(trajectory) for trajectory in record["trajectories"]],
        replay=decode_trajectory(record["replay"]) if "replay" in record else None,
    )


def _pack(values: array.array[Any]) -> str:
    return base64.b64encode(values).decode()


def _unpack(name: str, record: PartialSegmentRecord) -> array.array[Any]:
    return array.array(protocols.COLUMNS[name], base64.b64decode(cast("str", record.get(name, ""))))
