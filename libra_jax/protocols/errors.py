"""What goes wrong in a run. Each error carries one sentence that a user can act on; nothing else is shown to them."""

from __future__ import annotations


class LibraError(Exception):
    """An error whose message is one sentence that names what is wrong and how to mend it."""


class ConfigError(LibraError):
    """A configuration value that cannot be used; the message names the field."""


class DataError(LibraError):
    """A file of tasks, a trace or a model directory that cannot be used; the message names the file and line."""


class DeadlineMissed(LibraError):
    """A wait that outlasted its deadline; the message names the worker."""


class WorkerLost(LibraError):
    """An actor or engine process that died or became unreachable; what it was doing may be retried elsewhere."""


class PeerLost(WorkerLost):
    """What a process says that works together with a lost one and cannot tell which it was."""


class TrainerLost(WorkerLost):
    """The trainer that serves is gone, one of its processes or all: what it was asked is asked again of the next."""


class CheckpointFailed(LibraError):
    """A checkpoint that a disk does not take; the one before it still counts."""


class StepGivenUp(LibraError):
    """A training step that was given up when asked to, because the run has to end; the state is as before it."""


class EnvironmentCrashed(LibraError):
    """The environment itself broke (not a tool that returned a failure): infrastructure, never a reward of zero."""


class RewardFailed(EnvironmentCrashed):
    """A reward function broke again and again: infrastructure as well, but the attempt is whole: none is made anew."""
