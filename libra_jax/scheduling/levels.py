"""Levels of the feedback queue: which level an instance belongs to, and which level serves a length.

Level i serves requests with up to `scheduler.max_remaining_tokens[i]` tokens to generate; the widest level serves all
others. The instances of a level, and the requests that wait for them, are a bucket (`buckets.Bucket`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from libra_jax import protocols


def check(bounds: Sequence[int], kinds: Iterable[protocols.Kind]) -> None:
    """Refuses bounds that do not fit the instances; no bounds make one bucket of any instances.

    Raises:
      ConfigError: there is not one bound for each kind of instance but the last.
    """
    levels = sorted(set(kinds))
    if not bounds or len(bounds) == len(levels) - 1:
        return
    mixed = any(accelerator for _, accelerator in levels)
    named = ", ".join(f"{degree} on {accelerator}" if mixed else str(degree) for degree, accelerator in levels)
    what, fields = "tensor-parallel degrees", "rollout.tensor_parallel"
    if mixed:
        what, fields = "degrees and accelerators", "rollout.tensor_parallel and rollout.accelerators"
    raise protocols.ConfigError(
        f"config.scheduler.max_remaining_tokens: {len(bounds)} bounds do not separate the {len(levels)} {what} {named} "
        f"of {fields}; give {len(levels) - 1}, one for each but the last, or none for a single bucket"
    )


class LevelMap:
    """Maps an instance's kind, and a length, to the level of a bucket.

    Kinds are ordered by their degree, and those of one degree by the name of their accelerator.

    Args:
      bounds: `scheduler.max_remaining_tokens`.
      kinds: kinds of the layout's instances, if they are known. Otherwise a kind is known once an instance of it has
        been seen; until all are known, the lowest bounds apply.
    """

    def __init__(self, bounds: Sequence[int], kinds: Iterable[protocols.Kind] = ()) -> None:
        self.bounds = tuple(bounds)
        self.kinds = sorted(set(kinds))
        if self.kinds:
            check(self.bounds, self.kinds)

    @classmethod
    def planned(cls, buckets: Sequence[protocols.PlannedBucket]) -> LevelMap:
        """Returns the levels of a plan, the narrowest bucket first."""
        return cls(
            [bucket.max_remaining_tokens for bucket in buckets[:-1]],
            [(bucket.tensor_parallel, "") for bucket in buckets],
        )

    @property
    def count(self) -> int:
        """Number of buckets, at least one."""
        return max(1, len(self.kinds)) if self.bounds else 1

    def learn(self, instances: Sequence[protocols.Instance]) -> None:
        """Adds the kinds of the instances.

        A kind stays known when its last instance is lost, so that the other kinds keep their bounds.

        Raises:
          ConfigError: there are more kinds than the bounds can separate.
        """
        self.kinds = sorted({*self.kinds, *(instance.kind for instance in instances)})
        if len(self.kinds) > len(self.bounds) + 1:
            check(self.bounds, self.kinds)

    def of_kind(self, kind: protocols.Kind) -> int:
        """Returns the level of an instance of this kind."""
        # Without bounds there is a single bucket, for instances of any kind.
        return self.kinds.index(kind) if self.bounds else 0

    def of_length(self, tokens: float) -> int:
        """Returns the level that serves a request with `tokens` to generate."""
        # A length at a bound belongs below it. Levels of degrees not seen yet do not exist: the widest stands in.
        return min(bisect.bisect_left(self.bounds, tokens), self.count - 1)
