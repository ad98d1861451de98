"""Dialogues with an agent outside the run: what the gateway, the model's chat format and harnesses promise each other.

A harness is a program that the run does not step: it asks the gateway for model outputs, as it would ask OpenAI or
Anthropic. Each rollout is one session, and each request of the session becomes one output of its trajectory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from libra_jax.protocols.rollout import NO_OPTIONS, SamplingOptions
from libra_jax.protocols.tasks import Message, Task, ToolCall
from libra_jax.protocols.trajectories import ToolStatus


@dataclass(frozen=True)
class ToolSpec:
    """A tool that a request offers to the model.

    Attributes:
      name: name of the tool.
      description: text for the model.
      parameters: JSON schema of the arguments.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatRequest:
    """A request for one model output, in no API's own form.

    Attributes:
      messages: the whole dialogue. Some clients read the arguments of calls as JSON and write them again, so an earlier
        output's arguments may come back with other spaces: compare them as JSON.
      tools: tools that the model may call.
      max_tokens: most tokens to generate; None: as the run allows.
      stop: texts that end the output, which then ends before the text.
      temperature: temperature that the client asks for; None: the run's.
      failed_calls: ids of calls whose results the client marks as failed, in APIs that can (Anthropic's `is_error`).
      options: settings of the sampler that the client asks for. What is trained is sampled without them.
      hints: names of what else the client asks for and does not get.
      retry: the client's library marks the request as a further try: it has not read the answer to the first one.
      measures: the client asks for the number of the context's tokens alone: the `Reply` has no output.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    temperature: float | None = None
    failed_calls: Sequence[str] = ()
    options: SamplingOptions = NO_OPTIONS
    hints: Sequence[str] = ()
    retry: bool = False
    measures: bool = False


@dataclass(frozen=True)
class ContentDelta:
    """Further text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """Further text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A call, or a further part of it.

    Attributes:
      index: number of the call in its message.
      call_id: id of the call; empty but for the call's first delta.
      name: name of the tool; empty but for the call's first delta.
      arguments: further JSON text of the arguments.
    """

    index: int
    call_id: str
    name: str
    arguments: str


MessageDelta = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True)
class Reply:
    """The end of a model output.

    Attributes:
      message: the whole message.
      finish: "stop": the model ended its turn, or wrote a stop text; "length": the output was cut off; "tool_calls":
        the message calls tools.
      prompt_tokens: tokens of the context.
      output_tokens: tokens of the output.
      output_ids: the sampled tokens.
      log_probs: their log-probabilities at the sampling temperature.
      stop_text: text of `ChatRequest.stop` that ended the output; empty if none did.
    """

    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    output_tokens: int
    output_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    stop_text: str = ""


class OutputParser(Protocol):
    """Reads one model output as it streams in."""

    def feed(self, token_ids: Sequence[int]) -> Sequence[MessageDelta]:
        """Takes further tokens, stop tokens left out; returns the parts of the message that they complete."""
        ...

    def finish(self) -> tuple[Sequence[MessageDelta], Message]:
        """Ends the output; returns the parts that were held back, and the whole message."""
        ...


class ChatFormat(Protocol):
    """Turns dialogues into tokens and outputs into messages, as the model's template and parsers do.

    Attributes:
      stop_token_ids: tokens that end an assistant message; the first one is appended to an output that ends without.
    """

    stop_token_ids: tuple[int, ...]

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Returns the tokens of a whole dialogue, up to the header after which the assistant writes.

        Raises:
          DataError: the template refuses the messages; the message says why.
        """
        ...

    def extend(self, messages: Sequence[Message], known_count: int, tools: Sequence[ToolSpec]) -> list[int] | None:
        """Returns the tokens that follow the stop token of the output `messages[known_count - 1]`.

        They hold the messages after it, and the header after which the assistant writes. The first `known_count`
        messages are those that the outputs' parsers returned, with reasoning, even if a client sent it back without.
        The tools are those of the request that the output answered: with others, a dialogue begins another context.

        Returns:
          The tokens. None if the template writes the first `known_count` messages in another way once the others follow
          (it drops the reasoning of earlier turns, for example).

        Raises:
          DataError: the template refuses the messages.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of these tokens, special tokens among them."""
        ...

    def parser(self, tools: Sequence[ToolSpec], context: Sequence[int]) -> OutputParser:
        """Returns a parser for one output of a dialogue with these tools.

        Args:
          tools: tools of the request.
          context: tokens that the output follows. The ids of calls are derived from them and from the output, so they
            differ within a session and are the same in a replay.
        """
        ...


class Refused(Exception):
    """A request that the session does not serve. The API answers with an error of its own form.

    Attributes:
      kind: "invalid": the request is wrong; "context": its context leaves no room to answer; "limit": the rollout has
        reached a limit of the run; "closed": the session has ended; "busy": too many requests of the session at once.
      field: field of the request that is wrong, or empty.
    """

    def __init__(
        self, kind: Literal["invalid", "context", "limit", "closed", "busy"], message: str, field: str = ""
    ) -> None:
        super().__init__(message)
        self.kind, self.field = kind, field


class ClientGone(Exception):
    """Thrown into a reply at its `Reply`: the client went away before it had the answer."""


class Conversation(Protocol):
    """The session of one rollout, as the API sees it."""

    def reply(self, request: ChatRequest) -> AsyncGenerator[MessageDelta | Reply, None]:
        """Streams one model output. The last item is the `Reply`.

        The output counts as delivered, and becomes part of the dialogue, once the caller asks for an item after the
        `Reply`. It must count before the generator first waits after the `Reply`, because the client's next request may
        come any time from then on. There are three other ends:
        - The caller closes the generator before the `Reply`, or is cancelled while it waits for an item. The tokens
          stay: the same request asked again continues from them.
        - The caller closes the generator at the `Reply`: no one knows whether the client has the answer. It does if a
          later request continues it, or if the session ends without the same request asked again.
        - The caller throws `ClientGone` at the `Reply`. The same request asked again gets the same answer.

        Raises:
          Refused: the session does not serve the request.
        """
        ...

    def note_refusal(self, sentence: str) -> None:
        """Tells the session of a request that the API refused before `reply`, in the API's words."""


class Conversations(Protocol):
    """All sessions that a gateway serves."""

    model: str
    """Name of the model in answers."""

    def find(self, secret: str) -> Conversation | None:
        """Returns the session with this secret; None if there is none (any more).

        Takes the same time for each wrong secret of one length. Returns the same object as long as the session lives:
        the API keeps the session's limits by a weak reference to it.
        """
        ...


@dataclass(frozen=True)
class Endpoint:
    """Address of one session, for a harness.

    Attributes:
      url: base URL of the OpenAI-compatible API, ending in "/v1". Clients of Anthropic take it without "/v1".
      secret: the session's key: clients send it as API key.
      model: name of the model.
    """

    url: str
    secret: str = field(repr=False)
    model: str

    def environment(self) -> dict[str, str]:
        """Returns the environment variables by which clients of OpenAI and Anthropic find the session."""
        root = self.url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_BASE": self.url,
            "OPENAI_API_KEY": self.secret,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.secret,
            "ANTHROPIC_AUTH_TOKEN": self.secret,
            "ANTHROPIC_MODEL": self.model,
        }


@dataclass(frozen=True)
class Outcome:
    """The result of a harness.

    Attributes:
      reward: reward of the rollout.
      metrics: numbers to report.
      segment_rewards: rewards of single segments, by index, where they differ from the rollout's. The first segment,
        index 0, has the rollout's.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    segment_rewards: Mapping[int, float] = field(default_factory=dict)


class Harness(Protocol):
    """Drives one rollout: an environment that asks for outputs itself, through the gateway.

    A factory of `task.environment` that returns an object with `run` makes a harness instead of an `Environment`.
    """

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        """Runs the agent on the task until it ends, and scores it.

        An error that this method raises counts as a crash of the environment: the rollout starts afresh in a new one.
        """
        ...

    async def close(self) -> None:
        """Releases the rollout's resources, and ends its processes. Called once, also after a crash."""
        ...


class Gateway(Protocol):
    """Gives each rollout's session an address for as long as its harness runs."""

    async def open(
        self, conversation: Conversation, secret: str = "", reachable: Callable[[bool], None] = lambda _: None
    ) -> Endpoint:
        """Serves a session. Starts the server, if this is the first session.

        Args:
          conversation: the session.
          secret: key of its clients; empty: a random one.
          reachable: called with False when no request can arrive any more, and with True when they can again.

        Raises:
          LibraError: the server cannot start.
        """
        ...

    async def close(self, endpoint: Endpoint) -> None:
        """Ends a session: later requests with its secret are refused, and its requests under way are cancelled."""
        ...


class ReadsStatus(Protocol):
    """An optional companion of a harness: reads the outcome of tool calls off the wire."""

    def status(self, call: ToolCall | None, message: Message) -> tuple[str, ToolStatus] | None:
        """Returns the name of the tool and the outcome of its call, from a message that follows an output.

        Args:
          call: the call that the message answers; None if the message names none of the output's calls.
          message: a message of role "tool" or "user".

        Returns:
          The name and the outcome. None if no tool wrote the message.
        """
        ...
