"""Histories as clients write them again: the session knows its own outputs in them, and answers marked tries again."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import property_counts
import pytest
import session_doubles as doubles
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.chat import output_parsers
from libra_jax.rollouts import lines, loop, session, tool_results

LIMITS = loop.Limits(max_turns=20, max_tokens=400, max_context=4000, tool_seconds=5.0, temperature=1.0)


class CallParser(doubles.TextParser):
    """Reads what follows CALL as JSON of calls."""

    def __init__(self, context) -> None:
        super().__init__(late=True)
        self._context = tuple(context)

    def finish(self):
        _, message = super().finish()
        content, _, calls = message.content.partition("CALL")
        made = tuple(
            protocols.ToolCall(output_parsers.call_id(self._context, [], number), name, json.dumps(arguments))
            for number, (name, arguments) in enumerate(json.loads(calls or "[]"))
        )
        return [], protocols.Message("assistant", content, made)


class CallingFormat(doubles.Characters):
    """A chat format of characters whose outputs may hold calls."""

    def render(self, messages, tools):
        return super().render([dataclasses.replace(message, tool_calls=()) for message in messages], tools)

    def parser(self, tools, context):
        return CallParser(context)


def opened(writer, trajectory, **limits) -> session.RolloutSession:
    return session.RolloutSession(
        trajectory,
        form=CallingFormat(),
        sampler=writer,
        limits=dataclasses.replace(LIMITS, **limits),
        read_status=tool_results.status,
    )


async def ask(one, *messages, **more) -> protocols.Reply:
    last = None
    async for item in one.reply(protocols.ChatRequest(messages, **more)):
        last = item
    return last


def user(text: str) -> protocols.Message:
    return protocols.Message("user", text)


REWRITES = ("ids", "arguments", "text", "space", "as_text", "no_results_ids")


def rewritten(messages, rewrites):
    """A history as a client sends it: with new ids, other JSON, text left out, other white space, or calls as text."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        calls, content, answers = message.tool_calls, message.content, message.tool_call_id
        if calls and "as_text" in rewrites:
            shown = str([{"id": call.call_id, "function": call.name} for call in calls])
            made.append(protocols.Message("assistant", f"{content.strip()}\nCalling tools:\n{shown}"))
            continue
        if "ids" in rewrites:
            for call in calls:
                names[call.call_id] = f"call_{len(names)}"
        if "arguments" in rewrites:
            calls = tuple(
                dataclasses.replace(call, arguments=json.dumps(json.loads(call.arguments), indent=2)) for call in calls
            )
        calls = tuple(dataclasses.replace(call, call_id=names.get(call.call_id, call.call_id)) for call in calls)
        if "no_results_ids" in rewrites and answers:
            answers = f"unknown {len(made)}"
        if calls and "text" in rewrites:
            content = ""
        if "space" in rewrites:
            content = content.strip() + "\n"
        made.append(
            dataclasses.replace(message, content=content, tool_calls=calls, tool_call_id=names.get(answers, answers))
        )
    return made


words = st.text(alphabet="abc .\n", max_size=12)
outputs = st.tuples(words, st.lists(st.sampled_from(["search", "bash"]), min_size=1, max_size=3))
rewrite_sets = st.sets(st.sampled_from(REWRITES)).filter(
    # The arguments alone tell a call whose id is new, so clients that change both keep their JSON the same.
    lambda found: not {"as_text", "ids"} <= found and not {"as_text", "text"} <= found
)


@settings(max_examples=property_counts.examples(50, 150))
@given(script=st.lists(outputs, min_size=1, max_size=4), rewrites=rewrite_sets, failed=st.booleans())
def test_a_rewritten_history_goes_on_in_its_segment(script, rewrites, failed):
    async def test() -> None:
        texts = [f"{text}CALL{json.dumps([(name, {'n': 1}) for name in names])}" for text, names in script] + ["end"]
        count = iter(texts)
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(doubles.Writer(lambda context: next(count)), trajectory)
        history, sampled = [user("hello there")], 0
        for _ in texts:
            reply = await ask(one, *rewritten(history, rewrites))
            sampled += reply.output_tokens
            history.append(reply.message)
            for call in reply.message.tool_calls:
                said = "error: no" if failed else "fine"
                history.append(protocols.Message("tool", said, tool_call_id=call.call_id))
        one.close()
        assert trajectory.branches == []
        assert sum(trajectory.loss_mask) == sampled
        outcome = "failure" if failed else "success"
        for turn, (_, names) in zip(trajectory.turns, script, strict=False):
            assert (turn.tool, turn.status) == ("+".join(sorted(set(names))), outcome)

    asyncio.run(test())


@pytest.mark.parametrize(
    "change",
    [
        lambda message: dataclasses.replace(message, content="other words"),
        lambda message: dataclasses.replace(message, tool_calls=()),
        lambda message: dataclasses.replace(
            message, tool_calls=(protocols.ToolCall("new", "search", '{"n": 2}'),), content=""
        ),
        lambda message: dataclasses.replace(
            message, tool_calls=tuple(dataclasses.replace(call, arguments='{"n": 2}') for call in message.tool_calls)
        ),
        lambda message: dataclasses.replace(
            message, tool_calls=tuple(dataclasses.replace(call, name="rm") for call in message.tool_calls)
        ),
    ],
)
def test_a_history_with_another_output_begins_a_segment(change):
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(doubles.Writer(lambda context: 'Look.CALL[["search", {"n": 1}]]'), trajectory)
        first = await ask(one, user("x"))
        await ask(one, user("x"), change(first.message), user("go on"))
        assert len(trajectory.branches) == 1

    asyncio.run(test())


@pytest.mark.parametrize(
    ("known", "given", "same"),
    [
        ('{"cmd": "rm -rf build"}', '{"cmd": "ls"}', False),
        ('{"cmd": "ls"}', '{"cmd": "ls", "cwd": "/"}', False),
        ('{"a": 1, "b": [2]}', '{"b":[2],"a":1}', True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"cmd": "ls"', '{"cmd": "ls"}', True),
        ('{"cmd": "ls"}', "", True),
        ('{"a": NaN}', '{"a": null}', True),
        ("[" * 100_000, "{}", True),
    ],
)
def test_an_id_stands_only_for_arguments_that_are_no_json(known, given, same):
    pair = (protocols.ToolCall("call_1", "bash", arguments) for arguments in (known, given))
    assert lines.equal(*(protocols.Message("assistant", "", (call,)) for call in pair)) is same


def test_a_result_without_the_role_of_tools_reaches_the_scheduler():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        writer = doubles.Writer(lambda context: 'CALL[["search", {}]]')
        one = opened(writer, trajectory)
        first = await ask(one, user("x"))
        await ask(one, user("x"), first.message, user("Error: there is no such page"))
        assert (trajectory.turns[0].tool, trajectory.turns[0].status) == ("search", "failure")

    asyncio.run(test())


@pytest.mark.parametrize("turns", [1, 20])
def test_a_marked_try_gets_the_delivered_answer_again(turns):
    """An answer that was handed to the connection and never read is not another sample."""

    async def test() -> None:
        count = iter(range(9))
        trajectory = protocols.Trajectory("task/0", "task")
        writer = doubles.Writer(lambda context: f"answer {next(count)}")
        one = opened(writer, trajectory, max_turns=turns)
        first = await ask(one, user("x"))
        again = await ask(one, user("x"), retry=True)
        assert again == first
        assert (len(writer.asked), one.answered) == (1, 1)
        if turns > 1:
            await ask(one, user("x"), first.message, user("y"))
        one.close()
        assert trajectory.branches == []
        assert len(trajectory.turns) == min(turns, 2)

    asyncio.run(test())


def test_a_try_that_is_not_marked_is_another_sample():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(doubles.Writer(lambda context: "answer"), trajectory)
        await ask(one, user("x"))
        await ask(one, user("x"))
        assert len(trajectory.branches) == 1

    asyncio.run(test())


def test_a_count_of_tokens_is_no_output():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(doubles.Writer(lambda context: "answer"), trajectory)
        counted = await ask(one, user("hello"), measures=True)
        assert (counted.prompt_tokens, counted.output_tokens, one.answered) == (len("hello") + 3, 0, 0)
        reply = await ask(one, user("hello"))
        assert reply.prompt_tokens == counted.prompt_tokens

    asyncio.run(test())


def test_more_messages_than_tokens_of_context_are_refused_unrendered():
    async def test() -> None:
        one = opened(doubles.Writer(lambda context: "answer"), protocols.Trajectory("task/0", "task"))
        for measures in (True, False):
            with pytest.raises(protocols.Refused) as refused:
                await ask(one, *[user("unspeakable")] * 4000, measures=measures)
            assert refused.value.kind == "context"
            assert one.limit == (None if measures else "max_context")

    asyncio.run(test())
