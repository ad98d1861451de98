"""The states of a hybrid worker, and which may follow which.

A worker goes round: it rolls out, is borrowed, trains, is released and rolls out again. It stays where it is at rest
(`AT_REST`); in every other state something is under way, which has a deadline. A borrow can be given up until the
worker trains: then it turns to leaving. Whatever breaks leads to `failed`, and from there only activation leads back.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping


class State(enum.StrEnum):
    """Where a worker is, or what is being done with it.

    Attributes:
      ROLLOUT: its engine serves requests.
      DRAINING: its requests move to other instances; then the engine gives the devices up.
      FETCHING: its replica gets the parameters of the present version.
      WARMING: the replica compiles what it has not compiled yet.
      JOINING: the replica and the core open the channel for its gradient sums.
      TRAINING: the replica computes its share of every step.
      LEAVING: the channel is closed and the replica gives the devices up.
      ACTIVATING: the engine wakes, or starts anew, and gets the weights of the present version.
      FAILED: neither engine nor replica may be counted on.
    """

    ROLLOUT = "rollout"
    DRAINING = "draining"
    FETCHING = "fetching"
    WARMING = "warming"
    JOINING = "joining"
    TRAINING = "training"
    LEAVING = "leaving"
    ACTIVATING = "activating"
    FAILED = "failed"


AT_REST = frozenset({State.ROLLOUT, State.TRAINING, State.FAILED})
"""States that a worker stays in until it is asked to change."""

BORROWED = (State.DRAINING, State.FETCHING, State.WARMING, State.JOINING)
"""States on the way to training, in which the borrow can still be given up."""

UNDER_WAY = (*BORROWED, State.LEAVING, State.ACTIVATING)
"""States in which something is being done, each with its deadline."""

_ROUND = (State.ROLLOUT, *BORROWED, State.TRAINING, State.LEAVING, State.ACTIVATING, State.ROLLOUT)

NEXT: Mapping[State, State] = {**dict(itertools.pairwise(_ROUND)), State.FAILED: State.ACTIVATING}
"""What follows a state when its work is done, or, of one at rest, when the worker is asked to change."""

LEGAL: Mapping[State, frozenset[State]] = {
    state: frozenset(
        {NEXT[state]}
        | ({State.LEAVING} if state in BORROWED else set())
        | ({State.FAILED} if state is not State.FAILED else set())
    )
    for state in State
}
"""Every transition that there is."""
