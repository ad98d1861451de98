"""Moves of requests between rollout instances: decided by the scheduler, recorded in metrics, trace and report."""

from __future__ import annotations

import enum
from typing import NamedTuple, TypedDict


class MoveReason(enum.StrEnum):
    """Why a request goes on on another instance."""

    TOOL_RETURN = "tool_return"
    """A tool returned, and the policy chose the other instance."""

    BUDGET_OUTRUN = "budget_outrun"
    """It generated more tokens than its bucket is for."""

    ENGINE_LOST = "engine_lost"
    """The instance that served it is no longer live: it failed, ended by a plan, or switched to training."""

    PREEMPTED = "preempted"
    """It gave its place up to a longer request."""

    OVERFLOW = "overflow"
    """Its own queue had no free slot, and the other instance had one that would have idled."""

    AGING = "aging"
    """It had waited for `scheduler.ageing_seconds`, and the other instance had the first free slot."""


class Move(NamedTuple):  # a tuple is made in a third of a frozen dataclass's time, and decisions are many
    """A request's move between instances: the new one has to prefill its context, or to be given it.

    Attributes:
      request: id of the request.
      source: name of the instance that served it before.
      target: name of the instance that serves it from now on.
      reason: why it moves.
      expected_gain: seconds that the policy expects the move to save, its cost taken off; None if it made no estimate.
    """

    request: str
    source: str
    target: str
    reason: MoveReason
    expected_gain: float | None = None


class MoveRecord(TypedDict):
    """A move as `trace.jsonl` holds it; its turn's record names the request."""

    source: str
    target: str
    reason: MoveReason
    expected_gain: float | None
