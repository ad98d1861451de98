"""Environments in which tasks are attempted, and what else an attempt needs: a tokenizer, demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from libra_jax.protocols.tasks import Message, Task
from libra_jax.protocols.trajectories import ToolStatus


@dataclass(frozen=True)
class ToolReturn:
    """What a tool gave back: data that the policy sees, its failure or time-out included."""

    tool: str
    status: ToolStatus
    content: str
    seconds: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to one model output.

    Attributes:
      tool_returns: the returns of the tools called, in the calls' order, each shown to the policy as a tool message.
      messages: further messages shown to the policy.
      done: the attempt is over.
      reward: the attempt's reward; required when `done`.
      metrics: numbers to report, such as `tool_success`.
    """

    tool_returns: Sequence[ToolReturn] = ()
    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One attempt's world. Named in config as `"package.module:factory"`; the factory returns a fresh environment."""

    async def reset(self, task: Task) -> Sequence[Message]:
        """Opens the attempt and returns the first messages shown to the policy.

        Called again on the same object, it opens the attempt anew (a resumed attempt whose replay came out different).
        """
        ...

    async def step(self, output: str) -> StepResult:
        """Reads one model output (decoded text, stop token removed), runs what it asks for, and answers."""
        ...

    async def close(self) -> None:
        """Releases what the attempt holds; called once, also after a crash."""
        ...


class Listener(Protocol):
    """An environment's optional companion: hears an output while it is generated, to begin with what it asks for."""

    def hear(self, text: str) -> None:
        """The next piece of the output under way.

        A plain function that returns at once. It decides nothing: `step` gets the output whole, and an output may be
        stepped that was heard in part or not at all (a resumed attempt's), or heard and never stepped (one cut off).
        """
        ...


class Queued(Protocol):
    """An environment's optional companion: waits, before a step, for what it needs and other attempts hold."""

    async def ready(self, output: str) -> None:
        """Returns once `step` of this output finds what it needs, a sandbox for example.

        The wait is no tool's time: its deadline is `task.wait_seconds`, past which the environment has crashed. No
        instance's place is held meanwhile.
        """
        ...


class Resumable(Protocol):
    """An environment's optional companion: its attempts are taken up after a restart without running its tools again.

    Where it is not, or gives no snapshot, a fresh environment is stepped through the retained outputs.
    """

    async def snapshot(self) -> Mapping[str, Any] | None:
        """What `restore` needs to go on from here, JSON-able; None: from where the last one was taken. After a step."""
        ...

    async def restore(self, task: Task, state: Mapping[str, Any]) -> None:
        """Opens the attempt where a snapshot was taken, instead of `reset`. The policy has seen all up to there."""
        ...


class Demonstrator(Protocol):
    """An environment factory's optional companion: solved attempts for the warm start."""

    def demonstration(self, task: Task) -> Sequence[Message]:
        """The whole dialogue of a solved attempt: `reset`'s messages, then assistant and tool messages in turn."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back, with the chat template applied to increments only."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render(self, messages: Sequence[Message], *, first: bool, generation_prompt: bool) -> list[int]:
        """Tokens that `messages` add to the context.

        Args:
          messages: the increment only, never the dialogue so far.
          first: True at the start of the context (begin-of-text and the like belong there only).
          generation_prompt: append the header after which the assistant writes.
        """
        ...
