"""Writes answers of OpenAI's Responses: the response object, and the events of a stream in the API's order.

Events: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import protocols
from libra_jax.harness.gateway import errors, exchanges, fields


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class CallForm:
    """How a client reads the calls of a tool.

    Attributes:
      name: the tool's name for the client.
      namespace: its namespace; empty if it has none.
      custom: the tool takes free text.
    """

    name: str
    namespace: str = ""
    custom: bool = False


class ResponsesExchange:
    """See `exchanges.Exchange`. The API has one choice.

    An item ends when the next one begins. Its text is collected, because the events that end it repeat the text.

    Args:
      request: the request.
      streams: True for a stream of events.
      request_fields: fields of the request that the response repeats, and the model.
      forms: forms of the calls, by the names by which the model knows the tools.
      keep: keeps the dialogue and the response for later requests.
    """

    choices = 1

    def __init__(
        self,
        request: protocols.ChatRequest,
        streams: bool,
        request_fields: exchanges.Json,
        forms: Mapping[str, CallForm],
        keep: Callable[[protocols.Reply, exchanges.Json], None],
    ) -> None:
        self.request, self.streams, self._request_fields, self._keep = request, streams, request_fields, keep
        self._forms = forms
        self._id, self._created = _new_id("resp"), int(time.time())
        self._events = 0
        self._items: list[dict[str, Any]] = []  # items that have begun, as they are at their end
        self._open = ""  # name of the last item, unless it has ended
        self._text = ""  # its text or arguments so far
        self._called = ""  # name by which the model knows the tool of the last call

    def body(self, replies: Sequence[protocols.Reply]) -> exchanges.Json:
        (reply,) = replies
        message = reply.message
        items = []
        if message.reasoning:
            items.append(_reasoning(_new_id("rs"), message.reasoning))
        if message.content or not message.tool_calls:
            items.append(_message(_new_id("msg"), message.content))
        for call in message.tool_calls:
            items.append(self._call(_new_id("fc"), call.call_id, call.name, call.arguments))
        response = self._response(items, reply)
        self._keep(reply, response)
        return response

    def start(self) -> bytes:
        response = self._response([], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, choice: int, delta: protocols.MessageDelta) -> bytes:
        match delta:
            case protocols.ContentDelta(text):
                return self._begin("message") + self._add(
                    "response.output_text.delta", text, content_index=0, logprobs=[]
                )
            case protocols.ReasoningDelta(text):
                return self._begin("reasoning") + self._add("response.reasoning_text.delta", text, content_index=0)
        events = self._begin(f"call {delta.index}", delta)
        if self._items[-1]["type"] == "custom_tool_call":
            self._text += delta.arguments  # the text can be read once the JSON around it is whole
            return events
        return events + (
            self._add("response.function_call_arguments.delta", delta.arguments) if delta.arguments else b""
        )

    def end(self, choice: int, reply: protocols.Reply) -> bytes:
        # An empty answer has an empty message, as in the form that is not streamed.
        events = (b"" if self._items else self._begin("message")) + self._end_item()
        kind = "response.incomplete" if reply.finish == "length" else "response.completed"
        response = self._response(self._items, reply)
        self._keep(reply, response)
        return events + self._event(kind, response=response)

    def close(self, replies: Sequence[protocols.Reply]) -> bytes:
        return b""

    def failed(self, problem: errors.Problem) -> bytes:
        return self._event("error", code=problem.code or None, message=problem.message, param=problem.field or None)

    def _response(self, items: Sequence[exchanges.Json], reply: protocols.Reply | None) -> exchanges.Json:
        cut = reply is not None and reply.finish == "length"
        return {
            **self._request_fields,
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if reply is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "output": items,
            "text": {"format": {"type": "text"}},
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": reply and _usage(reply),
        }

    def _begin(self, name: str, call: protocols.ToolCallDelta | None = None) -> bytes:
        """Begins an item unless the one of this name is open."""
        if self._open == name:
            return b""
        events = self._end_item()
        self._open = name
        item: dict[str, Any]
        part: exchanges.Json | None = None
        if call is not None:
            self._called = call.name
            item = self._call(_new_id("fc"), call.call_id, call.name, "") | {"status": "in_progress"}
        elif name == "reasoning":
            item = _reasoning(_new_id("rs"), "") | {"content": [], "status": "in_progress"}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item = _message(_new_id("msg"), "") | {"content": [], "status": "in_progress"}
            part = _output_text("")
        self._items.append(item)
        events += self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if part is not None:
            events += self._of_item("response.content_part.added", content_index=0, part=part)
        return events

    def _add(self, kind: str, text: str, **content: Any) -> bytes:
        self._text += text
        return self._of_item(kind, delta=text, **content)

    def _end_item(self) -> bytes:
        """Ends the open item, with the events that repeat its text."""
        if not self._open:
            return b""
        item, text = self._items[-1], self._text
        self._open = self._text = ""
        if item["type"] == "reasoning":
            done = _reasoning(item["id"], text)
            events = self._of_item("response.reasoning_text.done", content_index=0, text=text)
        elif item["type"] == "message":
            done = _message(item["id"], text)
            events = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=[])
        else:
            done = self._call(item["id"], item["call_id"], self._called, text)
            if item["type"] == "custom_tool_call":
                events = self._of_item("response.custom_tool_call_input.delta", delta=done["input"])
                events += self._of_item("response.custom_tool_call_input.done", input=done["input"])
            else:
                events = self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        if "content" in done:
            events += self._of_item("response.content_part.done", content_index=0, part=done["content"][0])
        self._items[-1] = done
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=done)

    def _call(self, item_id: str, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        form = self._forms.get(name, CallForm(name))
        item = {"type": "function_call", "id": item_id, "call_id": call_id, "name": form.name, "status": "completed"}
        if form.namespace:
            item["namespace"] = form.namespace
        if form.custom:
            return {**item, "type": "custom_tool_call", "input": _free_text(arguments)}
        return {**item, "arguments": arguments}

    def _of_item(self, kind: str, **content: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        self._events += 1
        event = {"type": kind, "sequence_number": self._events - 1, **content}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), fields.encoded(event))


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(item_id: str, text: str) -> dict[str, Any]:
    content = [_output_text(text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": content}


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": "completed"}


def _free_text(arguments: str) -> str:
    """Returns the text that a model gives to a tool with free text; the arguments as they are if they hold none."""
    try:
        text = json.loads(arguments)[fields.CUSTOM_INPUT]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def _usage(reply: protocols.Reply) -> exchanges.Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
    }
