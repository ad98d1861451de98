"""Environments in which rollouts run, and what else a rollout needs: a tokenizer, demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from libra_jax.protocols.tasks import Message, Task
from libra_jax.protocols.trajectories import ToolStatus


@dataclass(frozen=True)
class ToolReturn:
    """The result of a tool call: data that the policy sees, even after a failure or a time-out.

    Attributes:
      tool: name of the tool.
      status: outcome of the call.
      content: text that the policy sees.
      seconds: seconds that the tool ran.
      call: what the call did, as `CausalState.call`; empty if the tool's name tells.
      error: class of its error, as `CausalState.error`; empty takes the one that the content of a failure names.
    """

    tool: str
    status: ToolStatus
    content: str
    seconds: float = 0.0
    call: str = ""
    error: str = ""


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to one model output.

    Attributes:
      tool_returns: results of the tools called, in the calls' order; the policy sees each as a tool message.
      messages: further messages for the policy.
      done: True if the rollout is over.
      reward: reward of the rollout; required if `done`, and refused before unless it is 0 or None.
      metrics: numbers to report, such as `tool_success`.
    """

    tool_returns: Sequence[ToolReturn] = ()
    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """The world of one rollout. The config names a factory, `"package.module:factory"`, for fresh environments."""

    async def reset(self, task: Task) -> Sequence[Message]:
        """Opens the rollout and returns the first messages for the policy.

        A second call on the same object restarts the rollout (if the replay of a resumed rollout came out different).
        """
        ...

    async def step(self, output: str) -> StepResult:
        """Reads one model output (decoded text, stop token removed), runs its tool calls, and answers.

        A tool's failure is a `ToolReturn`. An error that this method raises counts as a crash of the environment: the
        rollout starts afresh in a new one.
        """
        ...

    async def close(self) -> None:
        """Releases the rollout's resources. Called once, also after a crash."""
        ...


class Listener(Protocol):
    """An optional companion of an environment: hears an output during generation, to start its tools early."""

    def hear(self, text: str) -> None:
        """Takes the next piece of the current output.

        A plain function that returns at once. It decides nothing: `step` gets the whole output. An output may be
        stepped though it was heard only in part or not at all (in a resumed rollout). It may also be heard and never
        stepped (if cut off).
        """
        ...


class Queued(Protocol):
    """An optional companion of an environment: waits, before a step, for resources that other rollouts hold."""

    async def ready(self, output: str) -> None:
        """Returns when `step` of this output can get its resources, a sandbox for example.

        The wait does not count as tool time. Its deadline is `task.wait_seconds`; after it, the environment counts as
        crashed. The rollout holds no instance's slot meanwhile.
        """
        ...


class Resumable(Protocol):
    """An optional companion of an environment: resumes rollouts after a restart without running their tools again.

    If an environment is not resumable, or gives no snapshot, a fresh environment is stepped through the kept outputs.
    """

    async def snapshot(self) -> Mapping[str, Any] | None:
        """Returns the JSON-able state for `restore`, after a step.

        None stands for no snapshot at this point: a restart resumes from the last one.
        """
        ...

    async def restore(self, task: Task, state: Mapping[str, Any]) -> None:
        """Opens the rollout at a snapshot, instead of `reset`. The policy has seen everything before it."""
        ...


class Demonstrator(Protocol):
    """An optional companion of an environment factory: solved tasks for the warm start."""

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Returns the whole dialogue of a solved task: `reset`'s messages, then assistant and tool messages in turn."""
        ...


class Teacher(Protocol):
    """Scores the tokens of rollouts with another model, behind an endpoint."""

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probability of each token after those before it, at temperature 1; 0 for the first.

        Raises:
          TeacherFailed: the teacher failed repeatedly.
        """
        ...


class Tokenizer(Protocol):
    """Converts text to tokens and back, with the chat template applied to increments only.

    Attributes:
      vocab_size: number of token ids; every id is below it.
      stop_token_ids: tokens that end an assistant message.
      pad_token_id: token that fills rows; it is never trained.
    """

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without a chat template."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the tokens, for environments and people only: it is never tokenized again."""
        ...

    def render(self, messages: Sequence[Message], *, first: bool, generation_prompt: bool) -> list[int]:
        """Returns the tokens that `messages` add to the context.

        Args:
          messages: the increment only, never the dialogue so far.
          first: True at the start of the context; only there begin-of-text and similar tokens belong.
          generation_prompt: append the header after which the assistant writes.

        Raises:
          DataError: the template refuses the messages.
        """
        ...

    def render_output(self, before: Sequence[Message], output: Message, *, first: bool) -> list[int]:
        """Returns the tokens of a message as the policy writes it after `render(before)`, its stop token included.

        Args:
          before: the increment that the output answers.
          output: message of the assistant.
          first: True if `before` begins the context.

        Raises:
          DataError: the template refuses the messages, or drops a part of the output.
        """
        ...
