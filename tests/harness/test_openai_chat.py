"""Chat Completions, as OpenAI's own client sees them."""

import gateway_doubles as doubles
import openai
import pytest
from gateway_doubles import ASK, CALCULATOR, CALL, in_loop

from libra_jax import protocols


async def collected(stream: openai.AsyncStream) -> list:
    return [chunk async for chunk in stream]


@in_loop
async def test_an_answer_carries_text_usage_and_the_sessions_model():
    session = doubles.Scripted(doubles.said("Hello there."))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        answer = await client.chat.completions.create(model="any-name", messages=ASK)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == ("Hello there.", "stop", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 5, 16)
    assert answer.model == doubles.MODEL
    assert session.delivered


@in_loop
async def test_a_request_reaches_the_session_in_no_apis_form():
    session = doubles.Scripted()
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        await client.chat.completions.create(
            model="m",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
            ],
            tools=[{"type": "function", "function": CALCULATOR}],
            stop="END",
            max_tokens=9,
            max_completion_tokens=7,
            temperature=0.5,
        )
    (request,) = session.requests
    assert request.messages == [protocols.Message("system", "Be brief."), protocols.Message("user", "One\nTwo")]
    assert request.tools == [protocols.ToolSpec("calculator", "Adds.", CALCULATOR["parameters"])]
    assert (request.stop, request.max_tokens, request.temperature) == (["END"], 7, 0.5)


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_a_dialogue_with_a_tool_goes_through_the_client_unchanged(streams: bool):
    """The client sends back what it was given: the session must see the message that it made."""
    output = doubles.called(CALL, text="Let me see.", reasoning="Add them.")
    session = doubles.Scripted(output, doubles.said("21"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        asked = {"model": "m", "tools": [{"type": "function", "function": CALCULATOR}]}
        if streams:
            async with client.chat.completions.stream(**asked, messages=ASK) as stream:
                async for _ in stream:
                    pass
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked, messages=ASK)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.id, call.function.name, call.function.arguments) == ("call_1", "calculator", CALL.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
        written = choice.message.model_dump() if streams else choice.message
        if streams:  # what a client parses for itself is not the API's
            written["tool_calls"][0]["function"].pop("parsed_arguments", None)
            written.pop("parsed", None)
        await client.chat.completions.create(**asked, messages=[*ASK, written, result])
    _, echoed, returned = session.requests[1].messages
    assert echoed == output[-1].message
    assert returned == protocols.Message("tool", "21", tool_call_id="call_1")


@in_loop
async def test_a_stream_ends_with_the_reason_and_the_usage():
    session = doubles.Scripted(doubles.said("Hello there.", finish="length"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        options = {"include_usage": True}
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True, stream_options=options)
        chunks = await collected(stream)
    *others, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in others) == "Hello there."
    assert others[0].choices[0].delta.role == "assistant"
    assert others[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.total_tokens) == ([], 16)
    assert len({chunk.id for chunk in chunks}) == 1


@in_loop
async def test_a_stream_carries_no_usage_unless_asked_for():
    async with doubles.serving(doubles.Scripted()) as url, doubles.chat_client(url) as client:
        chunks = await collected(await client.chat.completions.create(model="m", messages=ASK, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_several_choices_are_drawn_at_once(streams: bool):
    scripts = [[0.05 * (3 - number), *doubles.said(f"choice {number}")] for number in range(3)]
    session = doubles.Scripted(*scripts, doubles.said("more"))
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        answer = await client.chat.completions.create(model="m", messages=ASK, n=3, stream=streams)
        if streams:
            texts = ["", "", ""]
            for chunk in await collected(answer):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            texts = [choice.message.content for choice in answer.choices]
            assert answer.usage.completion_tokens == 15
    assert sorted(texts) == ["choice 0", "choice 1", "choice 2"]
    assert len(session.delivered) == session.ended == 3


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_log_probs_come_with_the_ids_of_all_sampled_tokens(streams: bool):
    async with doubles.serving(doubles.Scripted()) as url, doubles.chat_client(url) as client:
        answer = await client.chat.completions.create(model="m", messages=ASK, logprobs=True, stream=streams)
        choice = (await collected(answer))[-1].choices[0] if streams else answer.choices[0]
    assert [token.token for token in choice.logprobs.content] == [f"token_id:{each}" for each in (7, 8, 9, 10, 2)]
    assert [token.logprob for token in choice.logprobs.content] == [-0.5, -0.25, 0.0, -1.5, -9999.0]


@in_loop
async def test_tool_choice_none_offers_no_tools():
    session = doubles.Scripted()
    tools = [{"type": "function", "function": CALCULATOR}]
    async with doubles.serving(session) as url, doubles.chat_client(url) as client:
        for choice in ("auto", "none"):
            await client.chat.completions.create(model="m", messages=ASK, tools=tools, tool_choice=choice)
    assert [len(request.tools) for request in session.requests] == [1, 0]


@in_loop
async def test_fields_that_change_nothing_are_accepted():
    async with doubles.serving(doubles.Scripted()) as url, doubles.chat_client(url) as client:
        await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hi", "name": "me"}],
            metadata={"a": "b"},
            parallel_tool_calls=False,
            reasoning_effort="high",
            service_tier="auto",
            store=True,
            user="me",
            top_p=1,
            presence_penalty=0.0,
            frequency_penalty=0,
            logit_bias={},
            seed=None,
            response_format={"type": "text"},
        )
