"""Stores successful rollouts, and gives one to a later group of the same prompt that has none (`algorithm.replay`).

Source: the experience pool of DART (arXiv 2509.23866).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import records, success


class StoredRecord(TypedDict):
    """A stored success: number of its group, its prompt, and the rollout."""

    group_id: int
    prompt: str
    rollout: records.TrajectoryRecord


class ReplayState(TypedDict):
    """Stored successes from the oldest on, and those of groups that later groups may not take from yet."""

    stored: list[StoredRecord]
    later: list[StoredRecord]


@dataclass(frozen=True)
class _StoredSuccess:
    """A stored success.

    Attributes:
      record: the rollout, encoded, which takes a tenth of the memory of its lists.
      tokens: number of its tokens.
      first_version: oldest policy version that sampled a token of it.
    """

    record: StoredRecord
    tokens: int
    first_version: int


class SuccessReplay:
    """The stored successes of a run.

    At most `algorithm.replay_per_prompt` successes of a prompt are kept, and `algorithm.replay_tokens` tokens in all:
    the newest. Groups enter in the order of their numbers, once `choose` is called for a group that the staleness bound
    has trained after them. So what a group is given depends on no timing, unless groups were replaced. What waits to
    enter is bounded by the outstanding groups.

    A stored rollout has the log-probabilities and versions that its own policies recorded.
    """

    def __init__(self, config: config_lib.RunConfig) -> None:
        self._config = config
        self._used = config.algorithm.replay != "none"
        # By number of the group, and of the success in it.
        self._stored: dict[tuple[int, int], _StoredSuccess] = {}
        self._later: dict[tuple[int, int], _StoredSuccess] = {}

    def add(self, group: protocols.Group) -> None:
        """Takes a group whose rollouts are all scored, before its rewards are shaped."""
        if not self._used:
            return
        solved = [one for one, solves in success.outcomes(self._config, group) if solves]
        for sample, rollout in enumerate(solved[: self._config.algorithm.replay_per_prompt]):
            # An environment's state is no use to a rollout that has ended.
            record = records.encode_trajectory(dataclasses.replace(rollout, snapshot=None))
            stored: StoredRecord = {"group_id": group.group_id, "prompt": group.task.prompt, "rollout": record}
            self._later[group.group_id, sample] = _measured(stored, rollout)

    def choose(self, group: protocols.Group) -> None:
        """Gives a new group a stored success of its prompt, if there is one. Call it for each group, in order.

        Its staleness is at most `algorithm.replay_max_staleness` at the last step that may train the group.
        """
        if not self._used:
            return
        settings, limits = self._config.algorithm, self._config.coordinator
        count, bound = limits.groups_per_step, limits.max_staleness
        self._advance(group.group_id // count * count - count * bound)
        last, max_staleness = group.dispatch_version + bound, settings.replay_max_staleness
        # No later group can take them either: versions only grow.
        for key in [key for key, one in self._stored.items() if last - one.first_version > max_staleness]:
            del self._stored[key]
        candidates = [one for one in self._stored.values() if one.record["prompt"] == group.task.prompt]
        if candidates:
            rng = random.Random(f"{self._config.seed}/algorithm.replay/{group.group_id}")
            rollout = records.decode_trajectory(rng.choice(candidates).record["rollout"])
            # Ids of rollouts are unique in a run.
            rollout.trajectory_id = f"{rollout.trajectory_id}-replayed{group.group_id}"
            rollout.replayed = True
            group.replay = rollout

    def join(self, group: protocols.Group) -> None:
        """Adds the success that a group was given to its rollouts if none of them succeeded, else drops it."""
        rollout, group.replay = group.replay, None
        outcomes = list(success.outcomes(self._config, group))
        # Where limits cut off all rollouts, the success would have nothing to be compared with.
        if rollout is not None and outcomes and not any(solves for _, solves in outcomes):
            group.trajectories.append(rollout)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of stored rollouts and tokens; empty if the run replays none."""
        if not self._used:
            return {}
        return {"replay/stored": len(self._stored), "replay/stored_tokens": self._tokens()}

    def state(self) -> ReplayState:
        """Returns a checkpoint's content."""
        stored, later = ([one.record for one in where.values()] for where in (self._stored, self._later))
        return {"stored": stored, "later": later}

    def restore(self, state: ReplayState) -> None:
        """Restores the result of `state`."""
        self._stored, self._later = (dict(_restored(entries)) for entries in (state["stored"], state["later"]))

    def _advance(self, before: int) -> None:
        """Lets the successes of groups with numbers below `before` enter, and drops the oldest beyond the limits."""
        settings = self._config.algorithm
        for key in sorted(key for key in self._later if key[0] < before):
            entered = self._later.pop(key)
            self._stored[key] = entered
            same = sorted(key for key, one in self._stored.items() if one.record["prompt"] == entered.record["prompt"])
            for older in same[: -settings.replay_per_prompt]:
                del self._stored[older]
        while self._tokens() > settings.replay_tokens:
            del self._stored[min(self._stored)]

    def _tokens(self) -> int:
        return sum(one.tokens for one in self._stored.values())


def _measured(record: StoredRecord, rollout: protocols.Trajectory) -> _StoredSuccess:
    versions = [
        version
        for segment in rollout.segments
        for version in segment.policy_versions
        if version != protocols.NO_VERSION
    ]
    return _StoredSuccess(
        record, sum(len(segment.token_ids) for segment in rollout.segments), min(versions, default=protocols.NO_VERSION)
    )


def _restored(entries: list[StoredRecord]) -> Iterator[tuple[tuple[int, int], _StoredSuccess]]:
    samples: dict[int, int] = {}
    for record in entries:
        number = record["group_id"]
        samples[number] = samples.get(number, -1) + 1
        yield (number, samples[number]), _measured(record, records.decode_trajectory(record["rollout"]))
