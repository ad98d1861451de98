"""Messages in other forms: as rows of data sets and clients write them, and as chat templates take them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import protocols

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that data sets use for the text that the model thought."""

EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of a field that stand for none."""

_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", *_REASONING)


def from_dict(item: Any) -> protocols.Message:
    """Returns the message that a dict in OpenAI's form holds. Fields that are empty or None count as absent.

    Raises DataError if a part of the message cannot be kept. The caller knows the row.
    """
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise protocols.DataError(f"{item!r:.80} is no message with role and content")
    subject = f"a message of the role {item['role']!r}"
    # A part that is dropped without a word would pose another task.
    for name, value in item.items():
        if name not in _FIELDS and value not in EMPTY:
            raise protocols.DataError(f"{subject} has {name!r}, which no chat template gets; remove it, or the row")
    calls = item.get("tool_calls") or ()
    if calls and item["role"] != "assistant":
        raise protocols.DataError(f"{subject} has tool_calls; only the assistant calls tools")
    texts = [item.get(name) or "" for name in ("tool_call_id", "name", *_REASONING)]
    if not all(isinstance(text, str) for text in texts) or not isinstance(calls, Sequence):
        raise protocols.DataError(
            f"{subject} has a tool_call_id, name or reasoning that is no text, or no list of calls"
        )
    call_id, name, *reasoning = texts
    return protocols.Message(
        item["role"],
        _text(item.get("content"), subject, optional=bool(calls)),
        tuple(_call(call, subject) for call in calls),
        call_id,
        next(filter(None, reasoning), ""),
        name,
    )


def _text(content: Any, subject: str, *, optional: bool) -> str:
    if isinstance(content, str) or (content is None and optional):
        return content or ""
    if not isinstance(content, list) or not content:
        raise protocols.DataError(f"{subject} has the content {content!r:.80}, which is no text")
    for part in content:
        kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise protocols.DataError(f"{subject} has content of the kind {kind!r}; a policy of text reads texts only")
    # As vLLM joins them for templates that take text.
    return "\n".join(part["text"] for part in content)


def _call(call: Any, subject: str) -> protocols.ToolCall:
    function = call.get("function") or call if isinstance(call, Mapping) else {}
    value = function.get("arguments") if isinstance(function, Mapping) else None
    value = json_object(value or "{}") if isinstance(value, str) or value is None else value
    if not isinstance(value, Mapping) or not isinstance(function.get("name"), str):
        raise protocols.DataError(
            f'{subject} has the call {call!r:.80}; a call is {{"id": ..., "type": "function", "function": '
            '{"name": ..., "arguments": a JSON object}}'
        )
    return protocols.ToolCall(str(call.get("id") or ""), function["name"], json.dumps(value, ensure_ascii=False))


def _complete(message: protocols.Message) -> protocols.Message:
    """Returns a message with all fields. An environment's own kind of message may have role and content only."""
    names = [field.name for field in dataclasses.fields(protocols.Message) if hasattr(message, field.name)]
    return protocols.Message(**{name: getattr(message, name) for name in names})


def for_character(message: protocols.Message) -> str:
    """Returns the text of a message for the character tokenizer: calls as Hermes writes them, reasoning in front."""
    message = _complete(message)
    thought = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    calls = [{"name": call.name, "arguments": _arguments(call)} for call in message.tool_calls]
    call_texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return thought + "\n".join([*([message.content] if message.content else []), *call_texts])


def for_template(message: protocols.Message) -> Mapping[str, Any]:
    """Returns a message as vLLM hands it to a chat template."""
    message = _complete(message)
    form: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        # Templates take arguments as objects; vLLM parses the text of the API for them.
        form["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    # Older templates read the second name of the reasoning.
    further = {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    further |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return form | {name: text for name, text in further.items() if text}


def named(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns the messages with the tool's name in each tool message, which clients leave out and Hermes demands.

    Others would write the dialogue differently with it, so it is given to templates alone that refuse without.
    """
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    return [
        {**message, "name": names[message["tool_call_id"]]} if message.get("tool_call_id") in names else message
        for message in messages
    ]


def tool_for_template(tool: protocols.ToolSpec) -> Mapping[str, Any]:
    """Returns a tool as vLLM hands it to a chat template: what a request leaves out is None."""
    described = {"description": tool.description or None, "parameters": dict(tool.parameters) or None}
    return {"type": "function", "function": {"name": tool.name, **described}}


def _arguments(call: protocols.ToolCall) -> Mapping[str, Any]:
    """Returns a call's arguments as an object; empty if their text is no JSON object, as in vLLM."""
    return json_object(call.arguments) or {}


def json_object(text: str) -> Mapping[str, Any] | None:
    """Returns the JSON object that a text is; None for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return None
    return value if isinstance(value, dict) else None
