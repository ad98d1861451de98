"""What clients send at their defaults is answered: fields that change nothing here are named, never refused."""

import asyncio
import json

import gateway_doubles as doubles
import openai
import pytest
from gateway_doubles import ASK, CALCULATOR, CALL, in_loop

from libra_jax import protocols

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
FUNCTION = {"type": "function", "function": CALCULATOR}
SCHEMA = {"type": "object", "properties": {"value": {"type": "integer"}}}
SAID = {"role": "assistant", "content": "Hello there."}
TURN = [*ASK, SAID, *ASK]

# Bodies as these clients send them: openai-agents, pydantic-ai, instructor, smolagents, langchain, aider, autogen,
# Vercel's AI SDK, Codex, Claude Code, Qwen Code, Cline, OpenRouter's and vLLM's own extensions.
DEFAULTS = [
    (CHAT, {"seed": 7}, ["seed"]),
    (CHAT, {"seed": 1.0}, ["seed"]),
    (CHAT, {"tools": [FUNCTION, {"type": "web_search"}]}, ["tools.web_search"]),
    (CHAT, {"tools": [{"type": "mcp", "server_url": "x"}]}, ["tools.mcp", "tools.server_url"]),
    (CHAT, {"response_format": {"type": "json_object"}}, ["schema"]),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, ["schema"]),
    (CHAT, {"tools": [FUNCTION], "tool_choice": "required"}, ["tool_choice"]),
    (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f"}}}, ["tool_choice"]),
    (CHAT, {"top_p": 0.95, "presence_penalty": 1.5, "top_k": 20}, ["presence_penalty", "top_k", "top_p"]),
    (CHAT, {"top_p": 1.0, "top_k": -1, "min_p": 0, "frequency_penalty": 0.0, "repetition_penalty": 1}, []),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, ["chat_template_kwargs"]),
    (CHAT, {"enable_thinking": True, "thinking": {"type": "enabled"}}, ["enable_thinking", "thinking"]),
    (CHAT, {"reasoning": {"effort": "high"}, "usage": {"include": True}}, ["reasoning", "usage"]),
    (CHAT, {"provider": {"order": ["x"]}, "no_such_field": 1}, ["no_such_field", "provider"]),
    (CHAT, {"max_tokens": -1, "stop": ""}, []),
    (CHAT, {"stop": ["", "END"], "logprobs": True, "top_logprobs": 5}, ["top_logprobs"]),
    (CHAT, {"messages": [*ASK, SAID | {"reasoning_details": []}, *ASK]}, ["messages.reasoning_details"]),
    (CHAT, {"messages": [*ASK, SAID | {"id": "a"}, *ASK, SAID | {"id": "b"}]}, ["messages.id"]),
    (CHAT, {"messages": [*ASK, SAID | {"refusal": None, "extra_content": {}}, *ASK]}, ["messages.extra_content"]),
    (CHAT, {"tools": [FUNCTION | {"cache_control": {"type": "ephemeral"}}]}, ["tools.cache_control"]),
    (CHAT, {"stream_options": {"include_usage": True, "loud": 1}}, ["stream_options.loud"]),
    (RESPONSES, {"client_metadata": {"x": "y"}}, ["client_metadata"]),
    (RESPONSES, {"include": ["web_search_call.action.sources"]}, ["include.web_search_call.action.sources"]),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, ["schema"]),
    (RESPONSES, {"tools": [{"type": "web_search"}, {"type": "function", **CALCULATOR}]}, ["tools.web_search"]),
    (RESPONSES, {"truncation": "auto", "tool_choice": "required"}, ["tool_choice", "truncation"]),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ["tools.web_search_20250305"]),
    (MESSAGES, {"tool_choice": {"type": "any"}, "top_k": 40, "top_p": 0.9}, ["tool_choice", "top_k", "top_p"]),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, ["schema"]),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "x"}}, []),
]  # fmt: skip
RIGHT = {
    CHAT: {"model": "m", "messages": ASK},
    RESPONSES: {"model": "m", "input": ASK},
    MESSAGES: {"model": "m", "messages": ASK, "max_tokens": 7},
}


@in_loop
async def test_what_clients_send_at_their_defaults_is_answered():
    session = doubles.Scripted()
    async with doubles.serving(session, requests_per_second=0) as url, doubles.plain_client(url) as client:
        for path, change, hints in DEFAULTS:
            answer = await client.post(f"/{path}", json=RIGHT[path] | change)
            assert answer.status_code == 200, (path, change, answer.text)
            request = session.requests[-1]
            assert sorted({*request.hints, *request.options.used()}) == hints, (path, change)
            assert request.max_tokens in (None, 7)


@in_loop
async def test_custom_calls_in_histories_are_calls_of_their_functions():
    """As OpenAI's library sends an answer with calls of tools with free text back."""
    session = doubles.Scripted()
    call = openai.types.chat.ChatCompletionMessageCustomToolCall(
        id="call_1", type="custom", custom={"name": "patch", "input": "-a\n+b"}
    )
    history = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    history.append({"role": "tool", "tool_call_id": "call_1", "content": "done"})
    tools = [{"type": "custom", "custom": {"name": "patch", "description": "Patches."}}, {"type": "web_search"}]
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        await client.chat.completions.create(model="m", messages=history, tools=tools, extra_body={"loud": 1})
    request = session.requests[0]
    assert request.messages[1].tool_calls == (protocols.ToolCall("call_1", "patch", '{"input":"-a\\n+b"}'),)
    assert [tool.name for tool in request.tools] == ["patch"]
    assert sorted(request.hints) == ["loud", "tools.web_search"]


@in_loop
async def test_all_of_those_that_fit_are_answered_together():
    """Fields of several clients, as frameworks on top of others send them: each with all that name other fields."""
    session = doubles.Scripted()
    async with doubles.serving(session, requests_per_second=0) as url, doubles.plain_client(url) as client:
        for path, first, hints in DEFAULTS:
            body, expected = dict(first), set(hints)
            for other_path, other, more in DEFAULTS:
                if path == other_path and not set(body) & set(other):
                    body, expected = body | other, expected | set(more)
            answer = await client.post(f"/{path}", json=RIGHT[path] | body)
            assert answer.status_code == 200, (body, answer.text)
            request = session.requests[-1]
            assert {*request.hints, *request.options.used()} == expected, body


@in_loop
async def test_a_tool_result_with_an_image_keeps_its_text():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "21"}, image]
    session = doubles.Scripted()
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    used = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
    returned = [{"type": "text", "text": "21"}, {"type": "image", "source": {}}]
    bodies = {
        CHAT: {
            "messages": [
                *ASK,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": parts},
            ]
        },
        RESPONSES: {
            "input": [
                {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "call_1",
                    "output": [{"type": "input_text", "text": "21"}, {"type": "input_image", "image_url": ""}],
                },
            ]
        },
        MESSAGES: {
            "messages": [
                *ASK,
                {"role": "assistant", "content": [used]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": returned}]},
            ]
        },
    }
    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        for path, body in bodies.items():
            answer = await client.post(f"/{path}", json=RIGHT[path] | body)
            assert answer.status_code == 200, answer.text
            assert session.requests[-1].messages[-1].content.startswith("21\n[")


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_kinds_of_client_tools_are_functions_and_come_back_in_kind(streams: bool):
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "mcp", "description": "", "tools": [{"type": "function", **CALCULATOR}]},
    ]
    calls = (
        protocols.ToolCall("c1", "apply_patch", '{"input": "*** Begin\\n+é"}'),
        protocols.ToolCall("c2", "mcp__calculator", "{}"),
    )
    session = doubles.Scripted(doubles.called(*calls), doubles.said("Done."))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        answer = await client.responses.create(model="m", input="Hi", tools=tools, stream=streams)
        if streams:
            answer = [event async for event in answer][-1].response
        patch, call = answer.output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", "*** Begin\n+é")
        assert (call.type, call.name, call.namespace) == ("function_call", "calculator", "mcp")
        results = [
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
            {"type": "function_call_output", "call_id": "c2", "output": "21"},
        ]
        items = [{"role": "user", "content": "Hi"}, *(item.model_dump(exclude_unset=True) for item in answer.output)]
        await client.responses.create(model="m", input=[*items, *results], tools=tools)
    assert [tool.name for tool in session.requests[0].tools] == ["apply_patch", "mcp__calculator"]
    said = session.requests[1].messages[1]
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]


@in_loop
async def test_tools_that_anthropic_defines_are_functions():
    session = doubles.Scripted()
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "memory_20250818", "name": "memory"},
    ]
    async with doubles.serving(session) as url, doubles.messages_client(url) as client:
        await client.beta.messages.create(model="m", messages=ASK, max_tokens=7, tools=tools)
    offered = {tool.name: set(tool.parameters["properties"]) for tool in session.requests[0].tools}
    assert {"command", "restart"} == offered["bash"]
    assert {"command", "path", "old_str", "new_str"} <= offered["str_replace_based_edit_tool"] & offered["memory"]


@in_loop
async def test_items_are_named_by_reference_and_responses_read_again():
    session = doubles.Scripted(doubles.called(CALL, text="Let me see."), doubles.said("21"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        first = await client.responses.create(model="m", input="Hi")
        items = [{"type": "item_reference", "id": item.id} for item in first.output]
        result = {"type": "function_call_output", "call_id": CALL.call_id, "output": "21"}
        await client.responses.create(model="m", input=[{"role": "user", "content": "Hi"}, *items, result])
        again = await client.responses.retrieve(first.id)
        assert again.output == first.output
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_none")
    assert session.requests[1].messages[1] == protocols.Message("assistant", "Let me see.", (CALL,))


@in_loop
async def test_tokens_of_a_context_are_counted_without_an_output():
    session = doubles.Scripted([doubles.reply()])
    async with doubles.serving(session) as url, doubles.messages_client(url) as client:
        counted = await client.messages.count_tokens(model="m", messages=ASK, system="Be brief.")
    assert counted.input_tokens == 11
    assert session.requests[0].measures


@in_loop
async def test_a_further_try_after_our_own_error_repeats_no_answer():
    failing = doubles.Scripted([protocols.WorkerLost("gone")], doubles.said("Hello there."))
    async with doubles.serving(failing) as url, doubles.chat_client(url, retries=1) as client:
        await client.chat.completions.create(model="m", messages=ASK)
    assert [request.retry for request in failing.requests] == [False, False]


@in_loop
async def test_further_tries_after_refusals_are_samples_and_others_repeat_an_answer():
    session = doubles.Scripted([0.5, *doubles.said("Hello there.")])
    body, mark = {"model": "m", "messages": ASK}, {"x-stainless-retry-count": "1"}
    async with doubles.serving(session, max_concurrent=1) as url, doubles.plain_client(url) as client:

        async def post(first: str = "Hello", **more) -> int:
            change = {"messages": [{"role": "user", "content": first}]}
            return (await client.post(f"/{CHAT}", json=body | change, **more)).status_code

        waiting = asyncio.create_task(post())
        await doubles.until(lambda: session.running == 1)
        assert [await post(), await post(headers=mark), await post(), await waiting] == [429, 429, 429, 200]
        assert [await post(headers=mark) for _ in range(3)] == [200] * 3
        assert [request.retry for request in session.requests] == [False, False, False, True]
        # A repeat that is refused stays one, and content that was not refused is a repeat at once.
        waiting = asyncio.create_task(post())
        await doubles.until(lambda: session.running == 1)
        assert [await post(headers=mark), await waiting] == [429, 200]
        assert [await post(headers=mark), await post("Bye", headers=mark)] == [200, 200]
        assert [request.retry for request in session.requests[-3:]] == [False, True, True]


@in_loop
async def test_the_session_is_told_of_what_the_api_refuses():
    session = doubles.Scripted()
    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        await client.post(f"/{CHAT}", json=RIGHT[CHAT] | {"functions": [{"name": "f"}]})
    assert session.refusals == ["functions: deprecated; use tools"]


@in_loop
async def test_a_large_request_leaves_the_loop_to_others():
    """200,000 messages were checked on the event loop, which stood still for as long."""
    session = doubles.Scripted()
    body = json.dumps(RIGHT[CHAT] | {"messages": [{"role": "user", "content": "x"}] * 200_000}).encode()
    longest = 0.0
    loop = asyncio.get_running_loop()

    async def beat() -> None:
        nonlocal longest
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            longest = max(longest, loop.time() - before)

    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        heart = asyncio.ensure_future(beat())
        began = loop.time()
        answer = await client.post(f"/{CHAT}", content=body)
        seconds = loop.time() - began
        heart.cancel()
    assert answer.status_code == 400
    assert "20000" in answer.json()["error"]["message"]
    assert longest < 0.5 * seconds + 0.2


@in_loop
async def test_anthropics_library_sends_whole_dialogues_to_a_server_without_threads():
    """Its tool runner asks for a thread at its default, and goes on without if the refusal has the API's code."""
    session = doubles.Scripted()
    async with doubles.serving(session) as url, doubles.plain_client(url) as client:
        answer = await client.post(f"/{MESSAGES}", json=RIGHT[MESSAGES] | {"thread": {"type": "create"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert not session.refusals, "it is no failure of the agent's requests"
