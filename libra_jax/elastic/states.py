"""Defines the states of a hybrid worker, and which state may follow which.

A worker goes round: rollout, switch to training, training, switch to rollout, rollout. It stays in a state at rest
(`AT_REST`). In every other state work is under way, which has a deadline. A switch to training can be aborted until the
worker trains; the worker then turns to leaving. Every error leads to `failed`, from which only activation leads back.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping


class State(enum.StrEnum):
    """State of a worker, or the work in progress on it.

    Attributes:
      ROLLOUT: its engine serves requests.
      DRAINING: its requests move to other instances, then its engine frees the devices.
      FETCHING: its training side receives the parameters of the present version.
      WARMING: its training side compiles the programs that it lacks.
      JOINING: training side and core open the gradient channel.
      TRAINING: its training side computes a share of every step.
      LEAVING: the gradient channel is closed, and the training side frees the devices.
      ACTIVATING: the engine wakes or restarts, and receives the weights of the present version.
      FAILED: neither engine nor training side can be relied on.
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
"""States in which a worker stays until it is asked to change."""

BORROWED = (State.DRAINING, State.FETCHING, State.WARMING, State.JOINING)
"""States on the way to training, in which the switch can still be aborted."""

UNDER_WAY = (*BORROWED, State.LEAVING, State.ACTIVATING)
"""States with work in progress, each with its deadline."""

_ROUND = (State.ROLLOUT, *BORROWED, State.TRAINING, State.LEAVING, State.ACTIVATING, State.ROLLOUT)

NEXT: Mapping[State, State] = {**dict(itertools.pairwise(_ROUND)), State.FAILED: State.ACTIVATING}
"""The next state once a state's work is done or, at rest, once the worker is asked to change."""

LEGAL: Mapping[State, frozenset[State]] = {
    state: frozenset(
        {NEXT[state]}
        | ({State.LEAVING} if state in BORROWED else set())
        | ({State.FAILED} if state is not State.FAILED else set())
    )
    for state in State
}
"""All legal transitions."""
