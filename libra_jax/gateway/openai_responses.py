"""OpenAI's Responses, as agents use it: reads requests. `response_events` writes the answers.

Field names: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BeforeValidator, Field

from libra_jax import protocols
from libra_jax.gateway import errors, exchanges, fields, response_events, sessions


class Thought(fields.Fields):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class Typed(fields.Fields):
    """What all items have."""

    id: fields.Ignored = None
    status: fields.Ignored = None


class MessageItem(Typed):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: fields.Content
    phase: fields.Ignored = None


class CallItem(Typed):
    type: Literal["function_call"]
    call_id: fields.Name
    name: fields.Name
    arguments: str
    caller: fields.Ignored = None
    namespace: fields.Ignored = None


class OutputItem(Typed):
    type: Literal["function_call_output"]
    call_id: fields.Name
    output: fields.Content
    caller: fields.Ignored = None
    name: fields.Ignored = None
    namespace: fields.Ignored = None


class ReasoningItem(Typed):
    type: Literal["reasoning"]
    summary: list[Thought] = Field(default_factory=list)
    content: list[Thought] | None = None
    encrypted_content: fields.Ignored = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem

ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
"""Class of each type of input item."""


class Tool(fields.Fields):
    """A function of the client."""

    type: Literal["function"]
    name: fields.Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    allowed_callers: fields.Ignored = None
    defer_loading: fields.Ignored = None
    output_schema: fields.Ignored = None
    strict: fields.Ignored = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "function":
            raise ValueError(f"tools of type {kind!r} run at OpenAI; define one of type 'function'")
        return value


class Format(fields.Fields):
    type: str

    @pydantic.field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value != "text":
            raise ValueError(fields.TEXT_ONLY)
        return value


class TextOptions(fields.Fields):
    format: Format | None = None
    verbosity: fields.Ignored = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class Create(fields.Request):
    """The body of POST /v1/responses."""

    model: str
    # Items are checked one by one: each type has a class of its own.
    input: Annotated[list[Any], BeforeValidator(_as_items), Field(min_length=1)]
    instructions: str | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Any = None
    max_output_tokens: fields.Count | None = None
    temperature: fields.Temperature | None = None
    previous_response_id: str | None = None
    include: list[str] = Field(default_factory=list)
    text: TextOptions = TextOptions()
    metadata: dict[str, Any] = Field(default_factory=dict)
    parallel_tool_calls: bool = True
    stream: bool = False

    ignored = fields.names(
        "access_programs max_tool_calls moderation prompt_cache_key prompt_cache_options prompt_cache_retention "
        "reasoning safety_identifier service_tier store stream_options user"
    )
    neutral: ClassVar[Mapping[str, fields.Neutral]] = {
        "top_p": ((1,), fields.SAMPLING),
        "top_logprobs": ((0,), "log-probabilities are part of /v1/chat/completions; leave it out"),
        "background": ((False,), "outputs end with their request; leave it out"),
        "context_management": (([],), "the gateway edits no history; the agent may do so itself"),
        "conversation": ((), "send the input items, or previous_response_id"),
        "image": ((), fields.TEXT_ONLY),
        "prompt": ((), "the gateway stores no prompts; send instructions and input"),
        "truncation": (("disabled",), "the gateway drops no input; leave it out"),
    }

    ENCRYPTED: ClassVar[str] = "reasoning.encrypted_content"

    @pydantic.field_validator("include")
    @classmethod
    def _is_known(cls, value: list[str]) -> list[str]:
        # Agents ask for it always. Reasoning travels as plain text here.
        for name in value:
            if name != cls.ENCRYPTED:
                raise ValueError(f"{name!r} is not supported")
        return value


def read(body: exchanges.Json, model: str, session: sessions.Session) -> exchanges.Exchange:
    """Reads a request. See `exchanges.Api`."""
    asked = Create.read(body)
    messages = [*_before(asked.previous_response_id, session), *_messages(_items(asked.input))]
    # Instructions hold for one response, so they are not kept.
    given = [protocols.Message("system", asked.instructions)] if asked.instructions else []
    request = protocols.ChatRequest(
        messages=[*given, *messages],
        tools=[fields.tool(tool.name, tool.description, tool.parameters) for tool in asked.tools]
        if fields.offers_tools(asked.tool_choice, ("required", "function", "allowed_tools", "custom", "mcp"))
        else (),
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
    )
    shown = {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "temperature": asked.temperature,
        "tool_choice": asked.tool_choice or "auto",
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": bool(tool.strict),
            }
            for tool in asked.tools
        ],
    }

    def keep(response_id: str, reply: protocols.Reply) -> None:
        session.keep(response_id, (*messages, reply.message))

    return response_events.Exchange(request, asked.stream, {"model": model, **shown}, keep)


def _before(response_id: str | None, session: sessions.Session) -> Sequence[protocols.Message]:
    if not response_id:
        return ()
    if response_id not in session.dialogues:
        raise errors.Problem(
            400,
            f"previous_response_id: the session keeps no response {response_id!r}. It keeps the last "
            f"{sessions.KEPT_RESPONSES}, in memory; send the whole input.",
            field="previous_response_id",
            code="previous_response_not_found",
        )
    return session.dialogues[response_id]


def _items(values: Sequence[Any]) -> list[Item]:
    items: list[Item] = []
    for number, value in enumerate(values):
        path = f"input[{number}]"
        if not isinstance(value, dict):
            raise errors.invalid(path, "must be an object")
        kind = value.get("type", "message")
        found = ITEMS.get(kind) if isinstance(kind, str) else None
        if found is None:
            raise errors.invalid(f"{path}.type", f"{kind!r} is not one of {', '.join(ITEMS)}")
        items.append(fields.validated(found, {"type": kind, **value}, path))
    return items


def _messages(items: Sequence[Item]) -> list[protocols.Message]:
    """Returns the messages of the input. Reasoning, text and calls of one output make one message."""
    messages: list[protocols.Message] = []
    reasoning = content = ""
    calls: list[protocols.ToolCall] = []

    def end() -> None:
        nonlocal reasoning, content
        if reasoning or content or calls:
            messages.append(protocols.Message("assistant", content, tuple(calls), reasoning=reasoning))
        reasoning = content = ""
        calls.clear()

    for item in items:
        match item:
            case ReasoningItem():
                if content or calls:
                    end()
                reasoning += "".join(part.text for part in item.content or item.summary)
            case CallItem():
                calls.append(protocols.ToolCall(item.call_id, item.name, item.arguments))
            case MessageItem(role="assistant"):
                # Text after calls that nothing has answered is of the same output.
                if content and not calls:
                    end()
                content += fields.text(item.content, "assistant")
            case MessageItem():
                end()
                role = "system" if item.role == "developer" else item.role
                messages.append(protocols.Message(role, fields.text(item.content, role)))
            case OutputItem():
                end()
                text = fields.text(item.output, "tool")
                messages.append(protocols.Message("tool", text, tool_call_id=item.call_id))
    end()
    return messages
