"""The errors of a run. Each carries one sentence that a user can act on; users see nothing else."""

from __future__ import annotations

import pickle


class LibraError(Exception):
    """An error whose message is one sentence: the problem and its fix."""


class ConfigError(LibraError):
    """An unusable configuration value; the message names the field."""


class DataError(LibraError):
    """An unusable task file, trace or model directory; the message names the file and line."""


class DeadlineMissed(LibraError):
    """A wait that exceeded its deadline; the message names the worker."""


class WorkerLost(LibraError):
    """An actor or engine process that died or became unreachable. Its work may be retried elsewhere."""


class PeerLost(WorkerLost):
    """Error of a process whose peer is lost, if the process cannot tell which peer it was."""


class TrainerLost(WorkerLost):
    """The serving trainer lost one or all of its processes. The same call is repeated on the next trainer."""


class CheckpointFailed(LibraError):
    """A checkpoint that could not be written; the previous checkpoint still counts."""


class StepAborted(LibraError):
    """A training step that was aborted on request, because the run has to end; the state is unchanged."""


class EnvironmentCrashed(LibraError):
    """The environment itself broke, not one of its tools: an infrastructure failure, never a reward of zero."""


class AgentFailed(EnvironmentCrashed):
    """An agent's own program failed: it raised an error, or exited with a status that is not scored.

    Attributes:
      reason: a few words, such as the error's class.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class AttemptVoided(EnvironmentCrashed):
    """The agent's own side left nothing to score: a killed agent, a missed deadline, no verdict.

    The machine may be the cause, or a command of the model. So the rollout is repeated once. If that happens again
    after an output of the model, the reward is zero, because a policy could otherwise void its bad attempts.
    """


class RewardFailed(EnvironmentCrashed):
    """A reward function broke repeatedly: an infrastructure failure too, but the rollout is whole and not restarted."""


class TaskRefused(EnvironmentCrashed):
    """A task that no rollout can pose, because the chat template refuses its messages or its prompt is too long."""


class TeacherFailed(EnvironmentCrashed):
    """The teacher behind an endpoint failed repeatedly: an infrastructure failure of a rollout that is whole."""


def portable(error: LibraError) -> LibraError:
    """Returns an error that another process can unpickle: the error itself, or a LibraError with its message.

    A subclass with a constructor of its own may pickle and not unpickle.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LibraError(str(error))
    return error
