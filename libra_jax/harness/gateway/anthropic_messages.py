"""Anthropic's Messages: reads requests, and writes messages and their events.

Field names and events: https://platform.claude.com/docs/en/api/messages.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BeforeValidator, Field

from libra_jax import protocols
from libra_jax.harness.gateway import errors, exchanges, fields, sessions

RAW_ARGUMENTS = "_raw_arguments"
"""Name under which arguments that are no JSON object travel, because the API has objects only."""

SIGNATURE = "libra-jax"
"""Signature of each thinking block. It signs nothing, but clients drop or rewrite blocks that have none."""

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Block(fields.Fields):
    """A content block of any supported type."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Annotated[fields.Content, BeforeValidator(fields.texts_of_result)] = Field(default_factory=list)
    is_error: bool | None = None
    cache_control: fields.Ignored = None
    caller: fields.Ignored = None
    citations: fields.Ignored = None
    signature: fields.Ignored = None
    toolset_name: fields.Ignored = None

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": ("text",),
        "thinking": ("thinking",),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_supported(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str):
            if kind not in cls.required:
                raise ValueError(f"content of type {kind!r} is not supported: the model reads text only")
            for name in cls.required[kind]:
                if name not in value:
                    raise ValueError(f"a block of type {kind!r} needs {name!r}")
        return value

    def arguments(self) -> str:
        """Returns the arguments of a call as JSON text."""
        if list(self.input) == [RAW_ARGUMENTS] and isinstance(self.input[RAW_ARGUMENTS], str):
            return self.input[RAW_ARGUMENTS]
        return json.dumps(self.input, ensure_ascii=False)


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class MessagesTurn(fields.Fields):
    """A message of the dialogue."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks)]

    @pydantic.model_validator(mode="after")
    def _fits_its_role(self) -> MessagesTurn:
        allowed = {"assistant": ("text", "thinking", "tool_use"), "user": ("text", "tool_result"), "system": ("text",)}
        for number, block in enumerate(self.content):
            if block.type not in allowed[self.role]:
                raise ValueError(
                    f"content[{number}]: no block of type {block.type!r} in a message of role {self.role!r}"
                )
        return self

    def messages(self) -> Iterator[protocols.Message]:
        """Yields the messages in no API's own form: each tool result is one of its own."""
        if self.role == "assistant":
            yield protocols.Message(
                "assistant",
                "".join(block.text for block in self.content),
                tuple(
                    protocols.ToolCall(block.id, block.name, block.arguments())
                    for block in self.content
                    if block.type == "tool_use"
                ),
                reasoning="".join(block.thinking for block in self.content),
            )
            return
        lines: list[str] = []
        for block in self.content:
            if block.type == "text":
                lines.append(block.text)
                continue
            if lines:
                yield protocols.Message(self.role, "\n".join(lines))
                lines = []
            yield protocols.Message("tool", fields.text(block.content, "tool"), tool_call_id=block.tool_use_id)
        if lines or not self.content:
            yield protocols.Message(self.role, "\n".join(lines))


class MessagesTool(fields.Fields):
    """A tool of the client."""

    name: fields.Name
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    allowed_callers: fields.Ignored = None
    cache_control: fields.Ignored = None
    defer_loading: fields.Ignored = None
    eager_input_streaming: fields.Ignored = None
    input_examples: fields.Ignored = None
    strict: fields.Ignored = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _of_kind(cls, value: Any) -> Any:
        """Describes a tool whose arguments Anthropic's models know: the client runs it as any other."""
        kind = value.get("type") if isinstance(value, dict) else None
        family = str(kind).rpartition("_")[0]
        if family in CLIENT_TOOLS:
            described = {name: {"type": _TYPES.get(name, "string")} for name in CLIENT_TOOLS[family].split()}
            shared_fields = {name: value[name] for name in ("name", "cache_control") if name in value}
            return {**shared_fields, "input_schema": {"type": "object", "properties": described}}
        return value


_FILES = "command path file_text old_str new_str insert_line insert_text view_range"

CLIENT_TOOLS: Mapping[str, str] = {
    "bash": "command restart",
    "text_editor": _FILES,
    "memory": f"{_FILES} old_path new_path",
}
"""Arguments of the tools that Anthropic defines and clients run, by the tool's type without its date.

Their documentation: https://platform.claude.com/docs/en/agents-and-tools/tool-use.
"""

_TYPES = {"restart": "boolean", "insert_line": "integer", "view_range": "array"}
"""Types of arguments that are no text."""


class OutputConfig(fields.Fields):
    effort: fields.Ignored = None
    format: dict[str, Any] | None = None
    task_budget: fields.Ignored = None


class MessagesBody(fields.RequestBody):
    """The body of POST /v1/messages, and of /v1/messages/count_tokens, which has no `max_tokens`."""

    model: str
    messages: Annotated[list[MessagesTurn], Field(min_length=1, max_length=fields.MOST_ITEMS)]
    max_tokens: fields.Count
    system: fields.Content = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = None
    stop_sequences: fields.Stops = Field(default_factory=list)
    temperature: fields.Temperature | None = None
    stream: bool = False
    output_config: OutputConfig = OutputConfig()
    output_format: dict[str, Any] | None = None

    ignored = fields.names(
        "betas billing_policy cache_control diagnostics fallbacks fallback_credit_token inference_geo metadata "
        "service_tier speed thinking user_profile_id workspace_id"
    )
    hinted: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "compaction": (),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    }
    neutral: ClassVar[Mapping[str, fields.Neutral]] = {
        "container": ((), fields.NOT_KEPT),
        "thread": ((), fields.NOT_KEPT),
        "mcp_servers": (([],), "the gateway calls no tools; offer them in tools"),
    }


def read(body: exchanges.Json, model: str, session: sessions.GatewaySession) -> exchanges.Exchange:
    """Reads a request. See `exchanges.Read`."""
    if body.get("thread") is not None:
        raise errors.Problem(400, f"thread: {fields.NOT_KEPT}", field="thread", code=errors.NO_THREADS)
    parameters, hints = MessagesBody.read(body)
    return _MessagesExchange(_request(parameters, hints), parameters.stream, model)


def read_count(body: exchanges.Json, model: str, session: sessions.GatewaySession) -> exchanges.Exchange:
    """Reads a request for the number of the context's tokens. See `exchanges.Read`."""
    parameters, hints = MessagesBody.read({**body, "max_tokens": 1})
    return _Count(dataclasses.replace(_request(parameters, hints), measures=True), False, model)


def _request(parameters: MessagesBody, hints: list[str]) -> protocols.ChatRequest:
    messages = [message for turn in parameters.messages for message in turn.messages()]
    if parameters.system:
        messages.insert(0, protocols.Message("system", fields.text(parameters.system, "system")))
    blocks = [block for turn in parameters.messages for block in turn.content]
    return protocols.ChatRequest(
        messages=messages,
        tools=_tools(parameters.tools, hints) if fields.offers_tools(parameters.tool_choice, hints) else (),
        max_tokens=parameters.max_tokens,
        stop=parameters.stop_sequences,
        temperature=parameters.temperature,
        failed_calls=[block.tool_use_id for block in blocks if block.is_error],
        options=parameters.options(parameters.output_config.format or parameters.output_format),
        hints=hints,
    )


def _tools(values: Sequence[exchanges.Json], hints: list[str]) -> list[protocols.ToolSpec]:
    """Returns the client's tools. Tools that run at Anthropic are hints: the model is not offered them."""
    tools = []
    for number, value in enumerate(values):
        kind = value.get("type")
        if kind in (None, "custom") or str(kind).rpartition("_")[0] in CLIENT_TOOLS:
            tool = fields.validated(MessagesTool, value, f"tools[{number}]", hints)
            tools.append(fields.tool(tool.name, tool.description, tool.input_schema))
        else:
            hints.append(f"tools.{kind}"[: fields.LONGEST_NAME])
    return tools


class _MessagesExchange:
    """See `exchanges.Exchange`. The API has one choice."""

    choices = 1

    def __init__(self, request: protocols.ChatRequest, streams: bool, model: str) -> None:
        self.request, self.streams, self._model = request, streams, model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = 0  # blocks that have begun
        self._open = ""  # type of the block that has not ended; for a call with its number
        self._arguments = ""  # of the open call, so far

    def body(self, replies: Sequence[protocols.Reply]) -> exchanges.Json:
        (reply,) = replies
        message = reply.message
        content: list[exchanges.Json] = []
        if message.reasoning:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in message.tool_calls:
            tool_input = _input(call.arguments)
            content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": tool_input})
        return {**self._head(), "content": content, **_stop(reply), "usage": _usage(reply)}

    def start(self) -> bytes:
        # The context's size is known at the end, and then replaces the 0 here.
        return _event("message_start", message={**self._head(), "usage": {"input_tokens": 0, "output_tokens": 0}})

    def part(self, choice: int, delta: protocols.MessageDelta) -> bytes:
        match delta:
            case protocols.ContentDelta(text):
                events = self._begin("text", {"type": "text", "text": ""})
                return events + self._delta({"type": "text_delta", "text": text})
            case protocols.ReasoningDelta(text):
                events = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return events + self._delta({"type": "thinking_delta", "thinking": text})
        block = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
        events = self._begin(f"tool_use {delta.index}", block)
        self._arguments += delta.arguments
        return events

    def end(self, choice: int, reply: protocols.Reply) -> bytes:
        events = self._end_block()
        return events + _event("message_delta", delta=_stop(reply), usage=_usage(reply)) + _event("message_stop")

    def close(self, replies: Sequence[protocols.Reply]) -> bytes:
        return b""

    def failed(self, problem: errors.Problem) -> bytes:
        return b"event: error\ndata: %b\n\n" % fields.encoded(errors.in_anthropic_form(problem))

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _begin(self, name: str, block: exchanges.Json) -> bytes:
        """Begins a block unless the one of this name is open. Blocks follow each other."""
        if self._open == name:
            return b""
        events = self._end_block()
        self._open = name
        self._blocks += 1
        return events + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        last = b""
        if self._open == "thinking":
            last = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        elif self._open.startswith("tool_use"):
            # All at once: clients raise an error at arguments that are no JSON, and only whole ones can be checked.
            last = self._delta({"type": "input_json_delta", "partial_json": fields.to_json(_input(self._arguments))})
        self._open = self._arguments = ""
        return last + _event("content_block_stop", index=self._blocks - 1)

    def _delta(self, delta: exchanges.Json) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)


class _Count(_MessagesExchange):
    """Answers with the number of the context's tokens alone."""

    def body(self, replies: Sequence[protocols.Reply]) -> exchanges.Json:
        return {"input_tokens": replies[0].prompt_tokens}


def _input(arguments: str) -> exchanges.Json:
    """Returns the arguments of a call as an object. `Block.arguments` reads it back."""
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)  # Python reads NaN and 1e999, which JSON cannot say
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: arguments}


def _stop(reply: protocols.Reply) -> exchanges.Json:
    if reply.finish == "stop" and reply.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
    return {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": None}


def _usage(reply: protocols.Reply) -> exchanges.Json:
    return {"input_tokens": reply.prompt_tokens, "output_tokens": reply.output_tokens}


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), fields.encoded({"type": kind, **content}))
