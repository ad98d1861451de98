"""Messages, as Anthropic's own client sees them."""

import gateway_doubles as doubles
import pytest
from gateway_doubles import ASK, CALCULATOR, CALL, in_loop

from libra_jax import protocols

TOOL = {"name": "calculator", "description": "Adds.", "input_schema": CALCULATOR["parameters"]}


@in_loop
async def test_an_answer_carries_text_usage_and_stop_reason():
    session = doubles.Scripted(doubles.said("Hello there."))
    async with doubles.serving(session) as url, doubles.messages_client(url) as client:
        answer = await client.messages.create(
            model="m",
            messages=ASK,
            max_tokens=7,
            system="Be brief.",
            stop_sequences=["END"],
            extra_body={"temperature": 0.5},  # the API has it, and this client leaves it out
        )
    (block,) = answer.content
    assert (block.text, answer.stop_reason, answer.model) == ("Hello there.", "end_turn", doubles.MODEL)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (11, 5)
    (request,) = session.requests
    assert request.messages == [protocols.Message("system", "Be brief."), protocols.Message("user", "Hi")]
    assert (request.max_tokens, request.stop, request.temperature) == (7, ["END"], 0.5)


@pytest.mark.parametrize(
    ("output", "reason", "text"),
    [
        (doubles.said("a", finish="length"), "max_tokens", None),
        (doubles.said("a", stop_text="END"), "stop_sequence", "END"),
        (doubles.called(CALL), "tool_use", None),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_stop_reasons_are_in_the_apis_words(output, reason, text, streams):
    async with doubles.serving(doubles.Scripted(output)) as url, doubles.messages_client(url) as client:
        asked = {"model": "m", "messages": ASK, "max_tokens": 7}
        if streams:
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, text)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (11, 5)


@pytest.mark.parametrize("arguments", [CALL.arguments, "{broken", '["a list"]', '{"a": NaN}', "{}", ""])
@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_a_dialogue_with_tools_goes_through_the_client_unchanged(arguments: str, streams: bool):
    """Arguments that are no object survive, too: the session must see what the model wrote."""
    calls = (CALL, protocols.ToolCall("call_2", "calculator", arguments))
    output = doubles.called(*calls, text="Let me see.", reasoning="Add them.")
    session = doubles.Scripted(output, doubles.said("21"))
    async with doubles.serving(session) as url, doubles.messages_client(url) as client:
        asked = {"model": "m", "tools": [TOOL], "max_tokens": 7}
        if streams:
            async with client.messages.stream(**asked, messages=ASK) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked, messages=ASK)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert answer.content[0].signature  # clients drop blocks without one
        results = [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "21"},
            {
                "type": "tool_result",
                "tool_use_id": "call_2",
                "content": [{"type": "text", "text": "no number"}],
                "is_error": True,
            },
            {"type": "text", "text": "Well?"},
        ]
        content = [block.model_dump(exclude_unset=True) for block in answer.content]
        for block in content:  # what a client parses for itself is not the API's
            block.pop("parsed_output", None)
        turns = [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
        await client.messages.create(**asked, messages=turns)
    request = session.requests[1]
    assert request.messages == [
        protocols.Message("user", "Hi"),
        output[-1].message,
        protocols.Message("tool", "21", tool_call_id="call_1"),
        protocols.Message("tool", "no number", tool_call_id="call_2"),
        protocols.Message("user", "Well?"),
    ]
    assert request.failed_calls == ["call_2"]


@in_loop
async def test_events_come_in_the_apis_order():
    session = doubles.Scripted(doubles.called(CALL, text="Let me see.", reasoning="Go"))
    async with doubles.serving(session) as url, doubles.messages_client(url) as client:
        stream = await client.messages.create(model="m", messages=ASK, max_tokens=7, tools=[TOOL], stream=True)
        events = [event async for event in stream]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2]


@in_loop
async def test_tool_choice_none_offers_no_tools():
    session = doubles.Scripted()
    async with doubles.serving(session) as url, doubles.messages_client(url) as client:
        for choice in ("auto", "none"):
            asked = {"model": "m", "messages": ASK, "max_tokens": 7, "tools": [TOOL]}
            await client.messages.create(**asked, tool_choice={"type": choice})
    assert [len(request.tools) for request in session.requests] == [1, 0]


@in_loop
async def test_fields_that_change_nothing_are_accepted():
    async with doubles.serving(doubles.Scripted()) as url, doubles.messages_client(url) as client:
        await client.beta.messages.create(
            model="m",
            max_tokens=7,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}]}],
            metadata={"user_id": "me"},
            service_tier="auto",
            thinking={"type": "enabled", "budget_tokens": 1024},
            betas=["interleaved-thinking-2025-05-14"],
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        )
