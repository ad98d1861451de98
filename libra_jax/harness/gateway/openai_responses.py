"""OpenAI's Responses, as agents use it: reads requests. `response_events` writes the answers.

Field names: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from libra_jax import protocols
from libra_jax.harness.gateway import errors, exchanges, fields, response_events, sessions


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


class CustomCallItem(Typed):
    type: Literal["custom_tool_call"]
    call_id: fields.Name
    name: fields.Name
    input: str
    namespace: fields.Ignored = None

    @property
    def arguments(self) -> str:
        """The call as one of the function that stands for the tool."""
        return fields.to_json({fields.CUSTOM_INPUT: self.input})


class OutputItem(Typed):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: fields.Name
    output: Annotated[fields.Content, BeforeValidator(fields.texts_of_result)]
    caller: fields.Ignored = None
    name: fields.Ignored = None
    namespace: fields.Ignored = None


class ReasoningItem(Typed):
    type: Literal["reasoning"]
    summary: list[Thought] = Field(default_factory=list)
    content: list[Thought] | None = None
    encrypted_content: fields.Ignored = None


Item = MessageItem | CallItem | CustomCallItem | OutputItem | ReasoningItem

ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
"""Class of each type of input item."""


class ResponsesTool(fields.Fields):
    """A function of the client."""

    type: Literal["function"] = "function"
    name: fields.Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    allowed_callers: fields.Ignored = None
    defer_loading: fields.Ignored = None
    output_schema: fields.Ignored = None
    strict: fields.Ignored = None


class Namespace(fields.Fields):
    """Functions of one origin, such as an MCP server."""

    type: Literal["namespace"]
    name: fields.Name
    tools: list[dict[str, Any]]
    description: fields.Ignored = None


class TextOptions(fields.Fields):
    format: dict[str, Any] | None = None
    verbosity: fields.Ignored = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(fields.RequestBody):
    """The body of POST /v1/responses."""

    model: str
    # Items are checked one by one: each type has a class of its own.
    input: Annotated[list[Any], BeforeValidator(_as_items), Field(min_length=1, max_length=fields.MOST_ITEMS)]
    instructions: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = None
    max_output_tokens: fields.Limit = None
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
    hinted: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "context_management": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    neutral: ClassVar[Mapping[str, fields.Neutral]] = {
        "background": ((False,), "outputs end with their request; leave it out"),
        "conversation": ((), "send the input items, or previous_response_id"),
        "image": ((), fields.TEXT_ONLY),
        "prompt": ((), "the gateway stores no prompts; send instructions and input"),
    }


ENCRYPTED = "reasoning.encrypted_content"
"""What agents ask for always in `include`. Reasoning travels as plain text here."""


def read(body: exchanges.Json, model: str, session: sessions.GatewaySession) -> exchanges.Exchange:
    """Reads a request. See `exchanges.Read`."""
    parameters, hints = ResponsesBody.read(body)
    hints += [f"include.{name}"[: fields.LONGEST_NAME] for name in parameters.include if name != ENCRYPTED]
    tools, forms = _tools(parameters.tools, hints)
    flat = {(form.namespace, form.name): name for name, form in forms.items()}
    before = _before(parameters.previous_response_id, session)
    messages = [*before, *_messages(_items(parameters.input, session, hints), flat)]
    # Instructions hold for one response, so they are not kept.
    instructions = [protocols.Message("system", parameters.instructions)] if parameters.instructions else []
    request = protocols.ChatRequest(
        messages=[*instructions, *messages],
        tools=tools if fields.offers_tools(parameters.tool_choice, hints) else (),
        max_tokens=parameters.max_output_tokens,
        temperature=parameters.temperature,
        options=parameters.options(parameters.text.format),
        hints=hints,
    )
    request_fields = {
        "instructions": parameters.instructions,
        "max_output_tokens": parameters.max_output_tokens,
        "metadata": parameters.metadata,
        "model": model,
        "parallel_tool_calls": parameters.parallel_tool_calls,
        "previous_response_id": parameters.previous_response_id,
        "temperature": parameters.temperature,
        "tool_choice": parameters.tool_choice or "auto",
        "tools": parameters.tools,
    }

    def keep(reply: protocols.Reply, response: exchanges.Json) -> None:
        session.keep((*messages, reply.message), response)

    return response_events.ResponsesExchange(request, parameters.stream, request_fields, forms, keep)


def _tools(
    values: Sequence[exchanges.Json], hints: list[str], namespace: str = "", path: str = "tools"
) -> tuple[list[protocols.ToolSpec], dict[str, response_events.CallForm]]:
    """Returns the client's tools as functions, and the form in which the client reads the calls of each.

    Tools that run at the API's owner are hints: the model is not offered them.
    """
    tools: list[protocols.ToolSpec] = []
    forms: dict[str, response_events.CallForm] = {}
    for number, value in enumerate(values):
        place, kind = f"{path}[{number}]", value.get("type")
        if kind == "namespace" and not namespace:
            inner = fields.validated(Namespace, value, place, hints)
            more, further = _tools(inner.tools, hints, inner.name, f"{place}.tools")
            tools += more
            forms |= further
            continue
        if kind not in (None, "function", "custom"):
            hints.append(f"tools.{kind}"[: fields.LONGEST_NAME])
            continue
        definition = {**fields.custom_tool(value), "type": "function"} if kind == "custom" else value
        tool = fields.validated(ResponsesTool, definition, place, hints)
        # Two namespaces may have functions of one name, and the model sees no namespaces.
        name = f"{namespace}__{tool.name}" if namespace else tool.name
        tools.append(fields.tool(name, tool.description, tool.parameters))
        forms[name] = response_events.CallForm(tool.name, namespace, kind == "custom")
    return tools, forms


def _before(response_id: str | None, session: sessions.GatewaySession) -> Sequence[protocols.Message]:
    if not response_id:
        return ()
    if response_id not in session.responses:
        raise errors.Problem(
            400,
            f"previous_response_id: the session keeps no response {response_id!r}. It keeps the last "
            f"{sessions.KEPT_RESPONSES}, in memory; send the whole input.",
            field="previous_response_id",
            code="previous_response_not_found",
        )
    return session.responses[response_id][0]


def _items(values: Sequence[Any], session: sessions.GatewaySession, hints: list[str]) -> list[Item]:
    items: list[Item] = []
    for number, value in enumerate(values):
        path = f"input[{number}]"
        if not isinstance(value, dict):
            raise errors.invalid(path, "must be an object")
        if value.get("type") == "item_reference":
            value = session.items.get(str(value.get("id")))
            if value is None:
                raise errors.invalid(f"{path}.id", "the session keeps no item with this id; send the item itself")
        kind = value.get("type", "message")
        item_type = ITEMS.get(kind) if isinstance(kind, str) else None
        if item_type is None:
            raise errors.invalid(f"{path}.type", f"{kind!r} is not one of {', '.join(ITEMS)}")
        items.append(fields.validated(item_type, {"type": kind, **value}, path, hints))
    return items


def _messages(items: Sequence[Item], flat: Mapping[tuple[str, str], str]) -> list[protocols.Message]:
    """Returns the messages of the input. Reasoning, text and calls of one output make one message.

    Args:
      items: the input.
      flat: names by which the model knows the tools, by their namespaces and names.
    """
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
            case CallItem() | CustomCallItem():
                name = flat.get((str(item.namespace or ""), item.name), item.name)
                calls.append(protocols.ToolCall(item.call_id, name, item.arguments))
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
