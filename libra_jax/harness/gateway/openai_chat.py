"""OpenAI's Chat Completions: reads requests, and writes completions and chunks.

Field names and events: https://platform.openai.com/docs/api-reference/chat. `reasoning_content` is the extension by
which clients of open models read a model's reasoning.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BeforeValidator, Field

from libra_jax import protocols
from libra_jax.harness.gateway import errors, exchanges, fields, sessions

LEAST_LOG_PROB = -9999.0
"""Log-probability that the API writes for a token of probability 0."""


class Function(fields.Fields):
    name: fields.Name
    arguments: str


def _as_function(value: Any) -> Any:
    """Returns a tool with free text, or a call of it, as a function's. Tools that the API's owner runs have none."""
    kind = value.get("type") if isinstance(value, dict) else None
    custom = value.get("custom") if kind == "custom" else None
    if isinstance(custom, dict):
        call = {"name": custom.get("name"), "arguments": fields.to_json({fields.CUSTOM_INPUT: custom.get("input")})}
        function = call if "input" in custom else fields.custom_tool(custom)
        return {**value, "type": "function", "function": function, "custom": None}
    return {**value, "function": None} if isinstance(kind, str) and kind not in ("function", "custom") else value


class ChatToolCall(fields.Fields):
    id: fields.Name
    function: Function
    type: Literal["function"] = "function"
    custom: None = None
    index: fields.Ignored = None  # clients that collect a stream leave it in
    provider_specific_fields: fields.Ignored = None  # LiteLLM's


class ChatMessage(fields.Fields):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: fields.Content = Field(default_factory=list)
    tool_calls: list[Annotated[ChatToolCall, BeforeValidator(_as_function)]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: fields.Ignored = None
    # Clients send an answer back with all its fields.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: fields.Ignored = None
    provider_specific_fields: fields.Ignored = None  # LiteLLM's, as the next
    thinking_blocks: fields.Ignored = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _result_as_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("role") == "tool":
            return {**value, "content": fields.texts_of_result(value.get("content"))}
        return value

    @pydantic.model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if (self.role == "tool") != bool(self.tool_call_id):
            raise ValueError("messages of role 'tool', and no others, need a tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of role 'assistant' have tool_calls")
        return self

    def message(self) -> protocols.Message:
        """Returns the message in no API's own form."""
        calls = (
            protocols.ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()
        )
        role = "system" if self.role == "developer" else self.role
        reasoning = self.reasoning_content or self.reasoning or ""
        content = fields.text(self.content, role)
        return protocols.Message(role, content, tuple(calls), self.tool_call_id or "", reasoning)


class Definition(fields.Fields):
    name: fields.Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: fields.Ignored = None


class ChatTool(fields.Fields):
    type: str
    function: Definition | None
    custom: None = None


class StreamOptions(fields.Fields):
    include_usage: bool = False
    include_obfuscation: fields.Ignored = None


class Completion(fields.RequestBody):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=fields.MOST_ITEMS)]
    tools: list[Annotated[ChatTool, BeforeValidator(_as_function)]] = Field(default_factory=list)
    tool_choice: Any = None
    n: fields.Count = 1
    stop: fields.Stops = Field(default_factory=list)
    max_tokens: fields.Limit = None
    max_completion_tokens: fields.Limit = None
    temperature: fields.Temperature | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    ignored = fields.names(
        "metadata moderation parallel_tool_calls prediction prompt_cache_key prompt_cache_options "
        "prompt_cache_retention reasoning_effort safety_identifier service_tier store user verbosity"
    )
    hinted: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "logit_bias": ({},),
        "top_logprobs": (0,),
        "web_search_options": (),
    }
    neutral: ClassVar[Mapping[str, fields.Neutral]] = {
        "modalities": ((["text"],), fields.TEXT_ONLY),
        "audio": ((), fields.TEXT_ONLY),
        "functions": (([],), "deprecated; use tools"),
        "function_call": (("auto", "none"), "deprecated; use tool_choice"),
    }


def read(body: exchanges.Json, model: str, session: sessions.GatewaySession) -> exchanges.Exchange:
    """Reads a request. See `exchanges.Read`."""
    parameters, hints = Completion.read(body)
    functions = [tool.function for tool in parameters.tools if tool.function]
    hints += [f"tools.{tool.type}"[: fields.LONGEST_NAME] for tool in parameters.tools if not tool.function]
    tools = [fields.tool(function.name, function.description, function.parameters) for function in functions]
    limits = [limit for limit in (parameters.max_tokens, parameters.max_completion_tokens) if limit is not None]
    request = protocols.ChatRequest(
        messages=[message.message() for message in parameters.messages],
        tools=tools if fields.offers_tools(parameters.tool_choice, hints) else (),
        max_tokens=min(limits, default=None),
        stop=parameters.stop,
        temperature=parameters.temperature,
        options=parameters.options(parameters.response_format),
        hints=hints,
    )
    return _ChatExchange(request, parameters, model)


class _ChatExchange:
    def __init__(self, request: protocols.ChatRequest, parameters: Completion, model: str) -> None:
        self.request, self.choices, self.streams = request, parameters.n, parameters.stream
        self._parameters = parameters
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def body(self, replies: Sequence[protocols.Reply]) -> exchanges.Json:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": number,
                    "message": _message(reply.message),
                    "finish_reason": reply.finish,
                    "logprobs": _log_probs(reply) if self._parameters.logprobs else None,
                }
                for number, reply in enumerate(replies)
            ],
            "usage": _usage(replies),
        }

    def start(self) -> bytes:
        return b"".join(self._chunk(number, {"role": "assistant", "content": ""}) for number in range(self.choices))

    def part(self, choice: int, delta: protocols.MessageDelta) -> bytes:
        match delta:
            case protocols.ContentDelta(text):
                return self._chunk(choice, {"content": text})
            case protocols.ReasoningDelta(text):
                return self._chunk(choice, {"reasoning_content": text})
        call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
        if delta.call_id:  # the call's first part
            call |= {"id": delta.call_id, "type": "function"}
            call["function"]["name"] = delta.name
        return self._chunk(choice, {"tool_calls": [call]})

    def end(self, choice: int, reply: protocols.Reply) -> bytes:
        return self._chunk(choice, {}, reply)

    def close(self, replies: Sequence[protocols.Reply]) -> bytes:
        usage = b""
        if self._parameters.stream_options.include_usage:
            usage = self._event({"choices": [], "usage": _usage(replies)})
        return usage + b"data: [DONE]\n\n"

    def failed(self, problem: errors.Problem) -> bytes:
        return b"data: %b\n\n" % fields.encoded(errors.in_openai_form(problem))

    def _chunk(self, choice: int, delta: exchanges.Json, reply: protocols.Reply | None = None) -> bytes:
        log_probs = _log_probs(reply) if reply and self._parameters.logprobs else None
        content = {"index": choice, "delta": delta, "finish_reason": reply and reply.finish, "logprobs": log_probs}
        return self._event({"choices": [content]})

    def _event(self, content: exchanges.Json) -> bytes:
        return b"data: %b\n\n" % fields.encoded({**self._head, "object": "chat.completion.chunk", **content})


def _message(message: protocols.Message) -> exchanges.Json:
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    content = message.content or (None if calls else "")
    body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        body["tool_calls"] = calls
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    return body


def _log_probs(reply: protocols.Reply) -> exchanges.Json:
    """Returns the log-probabilities of all sampled tokens, reasoning and stop token included, named by their ids."""
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": max(value, LEAST_LOG_PROB), "bytes": None, "top_logprobs": []}
            for token, value in zip(reply.output_ids, reply.log_probs, strict=True)
        ],
        "refusal": None,
    }


def _usage(replies: Sequence[protocols.Reply]) -> exchanges.Json:
    prompt, output = replies[0].prompt_tokens, sum(reply.output_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
