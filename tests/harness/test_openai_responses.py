"""Responses, as OpenAI's own client sees them."""

import gateway_doubles as doubles
import openai
import pytest
from gateway_doubles import CALCULATOR, CALL, in_loop
from openai.types import responses

from libra_jax import protocols

TOOL = {"type": "function", "strict": True, **CALCULATOR}


@in_loop
async def test_an_answer_carries_text_usage_and_status():
    session = doubles.Scripted(doubles.said("Hello there."))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        answer = await client.responses.create(model="m", input="Hi", instructions="Be brief.", max_output_tokens=7)
    assert (answer.output_text, answer.status, answer.model) == ("Hello there.", "completed", doubles.MODEL)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (11, 5)
    (request,) = session.requests
    assert request.messages == [protocols.Message("system", "Be brief."), protocols.Message("user", "Hi")]
    assert request.max_tokens == 7


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_an_output_that_was_cut_off_is_incomplete(streams: bool):
    session = doubles.Scripted(doubles.said("Hello there.", finish="length"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        answer = await client.responses.create(model="m", input="Hi", stream=streams)
        if streams:
            answer = [event async for event in answer][-1].response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_a_dialogue_with_a_tool_goes_through_the_client_unchanged(streams: bool):
    output = doubles.called(CALL, text="Let me see.", reasoning="Add them.")
    session = doubles.Scripted(output, doubles.said("21"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        answer = await client.responses.create(model="m", input="17 + 4?", tools=[TOOL], stream=streams)
        if streams:
            answer = [event async for event in answer][-1].response
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        items = [
            {"role": "user", "content": "17 + 4?"},
            *(item.model_dump(exclude_unset=True) for item in answer.output),
            {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "21"},
        ]
        include = ["reasoning.encrypted_content"]
        await client.responses.create(model="m", input=items, tools=[TOOL], include=include)
    asked, echoed, returned = session.requests[1].messages
    assert (asked.role, echoed) == ("user", output[-1].message)
    assert returned == protocols.Message("tool", "21", tool_call_id="call_1")


@in_loop
async def test_events_come_in_the_apis_order():
    session = doubles.Scripted(doubles.called(CALL, text="Let me see.", reasoning="Go"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        stream = await client.responses.create(model="m", input="Hi", tools=[TOOL], stream=True)
        events = [event async for event in stream]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if isinstance(event, responses.ResponseOutputItemDoneEvent)]
    assert done == events[-1].response.output


@in_loop
async def test_an_empty_output_has_one_empty_message():
    async with doubles.serving(doubles.Scripted(doubles.said(""))) as url, doubles.chat_client(url) as client:
        whole = await client.responses.create(model="m", input="Hi")
        streamed = [event async for event in await client.responses.create(model="m", input="Hi", stream=True)]
    for answer in (whole, streamed[-1].response):
        assert ([item.type for item in answer.output], answer.output_text) == (["message"], "")


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_a_response_continues_a_previous_one(streams: bool):
    output = doubles.called(CALL)
    session = doubles.Scripted(output, doubles.said("21"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        answer = await client.responses.create(model="m", input="17 + 4?", instructions="Add.", stream=streams)
        if streams:
            answer = [event async for event in answer][-1].response
        result = {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "21"}]}
        await client.responses.create(model="m", input=[result], previous_response_id=answer.id)
    assert session.requests[1].messages == [
        protocols.Message("user", "17 + 4?"),  # instructions hold for one response
        output[-1].message,
        protocols.Message("tool", "21", tool_call_id="call_1"),
    ]


@in_loop
async def test_a_previous_response_of_another_session_is_unknown():
    session, other = doubles.Scripted(), doubles.Scripted()
    async with doubles.serving(session, other) as url:
        async with doubles.chat_client(url) as client:
            answer = await client.responses.create(model="m", input="Hi")
        async with doubles.chat_client(url, doubles.OTHER) as client:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.responses.create(model="m", input="Hi", previous_response_id=answer.id)
    assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")


@in_loop
async def test_text_after_calls_belongs_to_the_same_message():
    """A model may speak after it calls; the two items of text are one output."""
    parts = [
        protocols.ContentDelta("First. "),
        protocols.ToolCallDelta(0, CALL.call_id, CALL.name, CALL.arguments),
        protocols.ContentDelta("Last."),
        doubles.reply("First. Last.", [CALL]),
    ]
    session = doubles.Scripted(parts, doubles.said("21"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        stream = await client.responses.create(model="m", input="Hi", stream=True)
        items = [event async for event in stream][-1].response.output
        await client.responses.create(model="m", input=[item.model_dump(exclude_unset=True) for item in items])
    assert session.requests[1].messages == [parts[-1].message]


@in_loop
async def test_messages_of_an_example_dialogue_stay_apart():
    session = doubles.Scripted()
    items = [
        {"role": "system", "content": "Count."},
        {"role": "assistant", "content": "One."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two."}]},
        {"role": "user", "content": "Go on."},
    ]
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        await client.responses.create(model="m", input=items)
    texts = [(message.role, message.content) for message in session.requests[0].messages]
    assert texts == [("system", "Count."), ("assistant", "One."), ("assistant", "Two."), ("user", "Go on.")]
