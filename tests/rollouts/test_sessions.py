"""Sessions: which tokens a harness's requests go on from, and what the trajectory holds afterwards."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import session_doubles as doubles

from libra_jax import protocols
from libra_jax.coordinator import records
from libra_jax.data import sequences as sequences_lib
from libra_jax.rollouts import loop, session, tool_results

LIMITS = loop.Limits(max_turns=20, max_tokens=40, max_context=400, tool_seconds=5.0, temperature=1.0)


def user(text: str) -> protocols.Message:
    return protocols.Message("user", text)


def tool(text: str) -> protocols.Message:
    return protocols.Message("tool", text)


def echo(context: str) -> str:
    """Answers with the length of the context, so that each context has its own output."""
    return f"out{len(context)}"


def opened(writer=None, trajectory=None, *, forgets=False, late=False, **limits) -> session.RolloutSession:
    return session.RolloutSession(
        trajectory if trajectory is not None else protocols.Trajectory("task/0", "task"),
        form=doubles.Characters(forgets=forgets, late=late),
        sampler=writer or doubles.Writer(echo),
        limits=dataclasses.replace(LIMITS, **limits),
        read_status=tool_results.status,
    )


async def ask(one: session.RolloutSession, *messages: protocols.Message, **more) -> protocols.Reply:
    last = None
    async for item in one.reply(protocols.ChatRequest(messages, **more)):
        last = item
    assert isinstance(last, protocols.Reply)
    return last


def text_of(segment: protocols.Segment) -> str:
    return doubles.CHARACTERS.decode(segment.context())


def test_requests_that_extend_the_dialogue_make_one_segment():
    async def test() -> None:
        trajectory, writer = protocols.Trajectory("task/0", "task"), doubles.Writer(echo)
        one = opened(writer, trajectory)
        first = await ask(one, user("hello"))
        second = await ask(one, user("hello"), first.message, tool("error: no"))
        one.close()
        assert trajectory.branches == []
        sampled = [token for token, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine]
        assert sampled == [*first.output_ids, *second.output_ids]
        assert writer.asked[1][: len(writer.asked[0]) + len(first.output_ids)] == [*writer.asked[0], *first.output_ids]
        assert set(trajectory.policy_versions) == {7, protocols.NO_VERSION}
        assert [(turn.tool, turn.status) for turn in trajectory.turns] == [("tool", "failure"), (None, None)]
        assert writer.events == [
            ("task/0", "called"),
            ("task/0", protocols.CausalState("tool", trajectory.turns[0].payload_tokens, "failure")),
            ("task/0", "called"),
        ]

    asyncio.run(test())


def test_a_summarised_history_begins_a_segment_at_the_common_prefix():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(trajectory=trajectory)
        system = protocols.Message("system", "be brief")
        first = await ask(one, system, user("long question"))
        await ask(one, system, user("long question"), first.message, tool("a long return"))
        third = await ask(one, system, user("summary of it all"))
        one.close()
        (branch,) = trajectory.branches
        assert branch.parent is trajectory
        assert (
            doubles.CHARACTERS.decode(trajectory.context()[: branch.shared]) == "<|system|>be brief<|im_end|><|user|>"
        )
        assert text_of(branch).endswith(
            "<|user|>summary of it all<|im_end|><|assistant|>" + third.message.content + "<|im_end|>"
        )
        assert sum(branch.loss_mask) == len(third.output_ids)
        assert not branch.loss_mask[0]

    asyncio.run(test())


def test_a_child_that_shares_a_dialogue_begins_after_its_output():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(trajectory=trajectory)
        first = await ask(one, user("plan"))
        begun = (user("plan"), first.message)
        await ask(one, *begun, tool("go on"))
        await ask(one, *begun, user("sub task"))
        one.close()
        (child,) = trajectory.branches
        assert doubles.CHARACTERS.decode(child.context()[: child.shared]).endswith(first.message.content + "<|im_end|>")
        assert text_of(child).count("plan") == 1

    asyncio.run(test())


def test_several_samples_of_one_context_train_each_output_once():
    async def test() -> None:
        count = iter(range(100))
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(doubles.Writer(lambda context: f"sample {next(count)}"), trajectory)
        replies = await asyncio.gather(*(ask(one, user("x")) for _ in range(3)))
        one.close()
        assert len({reply.message.content for reply in replies}) == 3
        assert [sum(segment.loss_mask) for segment in trajectory.segments] == [
            len(reply.output_ids) for reply in replies
        ]
        assert not any(segment.loss_mask[0] for segment in trajectory.segments)

    asyncio.run(test())


def test_a_template_that_forgets_reasoning_begins_new_segments():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(doubles.Writer(lambda context: "(hm) yes"), trajectory, forgets=True)
        first = await ask(one, user("a"))
        await ask(one, user("a"), first.message, user("b"))
        one.close()
        (branch,) = trajectory.branches
        assert "(hm)" in text_of(trajectory)
        assert text_of(branch).count("(hm)") == 1, "only the output that was sampled here"
        assert sum(branch.loss_mask) == len("(hm) yes") + 1

    asyncio.run(test())


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_text_ends_the_output_at_its_token(late):
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(doubles.Writer(lambda context: "one\nEND two", each=5), trajectory, late=late)
        reply = await ask(one, user("x"), stop=("\nEND",))
        assert (reply.message.content, reply.finish) == ("one", "stop")
        assert doubles.CHARACTERS.decode(reply.output_ids) == "one\nEND"
        assert tuple(trajectory.token_ids[-len(reply.output_ids) :]) == reply.output_ids
        await ask(one, user("x"), reply.message, user("more"), stop=("\nEND",))
        assert trajectory.branches == []
        assert "one\nEND<|im_end|><|user|>more" in text_of(trajectory)
        assert sum(trajectory.loss_mask) == 2 * len("one\nEND"), "the end that the sampler did not write is no sample"

    asyncio.run(test())


def test_a_resumed_output_ends_at_its_stop_text_although_more_had_been_sampled():
    async def test() -> None:
        trajectory, writer = protocols.Trajectory("task/0", "task"), doubles.Writer(lambda context: "one\nEND two")
        await ask(opened(writer, trajectory), user("x"))  # the run ended before the agent's stop text was applied
        again = opened(writer, trajectory)
        reply = await ask(again, user("x"), stop=("\nEND",))
        assert reply.message.content == "one"
        await ask(again, user("x"), reply.message, user("more"), stop=("\nEND",))
        again.close()
        assert trajectory.branches == []
        assert sum(trajectory.loss_mask) == 2 * len("one\nEND"), "what no agent saw is no sample"

    asyncio.run(test())


@pytest.mark.parametrize("each", [1, 2, 3, 7])
def test_streamed_pieces_add_up_to_the_message(each):
    async def test() -> None:
        one = opened(doubles.Writer(lambda context: "some words STOP here", each=each))
        pieces, reply = [], None
        async for item in one.reply(protocols.ChatRequest([user("x")], stop=("STOP", "STAY"))):
            if isinstance(item, protocols.ContentDelta):
                pieces.append(item.text)
            else:
                reply = item
        assert "".join(pieces) == reply.message.content == "some words "

    asyncio.run(test())


def test_a_client_that_vanishes_gets_the_same_output_when_it_asks_again():
    async def test() -> None:
        trajectory, writer = protocols.Trajectory("task/0", "task"), doubles.Writer(lambda context: "a long answer")
        one = opened(writer, trajectory)
        writer.gate.clear()
        stream = one.reply(protocols.ChatRequest([user("x")]))
        assert isinstance(await anext(stream), protocols.ContentDelta)
        await stream.aclose()
        assert one.active == 0
        kept = list(trajectory.token_ids)
        writer.gate.set()
        reply = await ask(one, user("x"))
        assert reply.message.content == "a long answer"
        assert list(trajectory.token_ids[: len(kept)]) == kept
        assert trajectory.branches == []
        assert len(trajectory.turns) == 1

    asyncio.run(test())


def test_an_answer_that_was_never_delivered_is_given_again():
    async def test() -> None:
        trajectory, writer = protocols.Trajectory("task/0", "task"), doubles.Writer(echo)
        one = opened(writer, trajectory)
        stream = one.reply(protocols.ChatRequest([user("x")]))
        items = [item async for item in _until_reply(stream)]
        await stream.aclose()
        again = await ask(one, user("x"))
        assert again == items[-1]
        assert len(writer.asked) == 1, "no token was sampled twice"

    asyncio.run(test())


def test_an_answer_of_which_nobody_knows_is_trained_if_it_is_not_asked_again():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(trajectory=trajectory)
        stream = one.reply(protocols.ChatRequest([user("x")]))
        items = [item async for item in _until_reply(stream)]
        await stream.aclose()
        one.close()
        assert sum(trajectory.loss_mask) == len(items[-1].output_ids)

    asyncio.run(test())


def test_an_answer_whose_client_is_gone_is_kept_for_it_and_not_trained():
    async def test() -> None:
        trajectory, writer = protocols.Trajectory("task/0", "task"), doubles.Writer(echo)
        one = opened(writer, trajectory)
        for _ in range(2):
            stream = one.reply(protocols.ChatRequest([user("x")]))
            items = [item async for item in _until_reply(stream)]
            with pytest.raises(StopAsyncIteration):
                await stream.athrow(protocols.ClientGone)
            assert isinstance(items[-1], protocols.Reply)
        assert len(writer.asked) == 1
        one.close()
        assert trajectory.generated_tokens == 0

    asyncio.run(test())


def test_an_answer_that_arrived_unnoticed_becomes_part_of_the_dialogue():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(trajectory=trajectory)
        stream = one.reply(protocols.ChatRequest([user("x")]))
        items = [item async for item in _until_reply(stream)]
        await stream.aclose()
        second = await ask(one, user("x"), items[-1].message, user("y"))
        one.close()
        assert trajectory.branches == []
        assert sum(trajectory.loss_mask) == len(items[-1].output_ids) + len(second.output_ids)

    asyncio.run(test())


def test_a_call_that_the_client_marks_as_failed_has_failed():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(trajectory=trajectory)
        first = await ask(one, user("x"))
        returned = protocols.Message("tool", "fine", tool_call_id="c1")
        await ask(one, user("x"), first.message, returned, failed_calls=("c1",))
        assert trajectory.turns[0].status == "failure"

    asyncio.run(test())


async def _until_reply(stream):
    async for item in stream:
        yield item
        if isinstance(item, protocols.Reply):
            return


def test_tokens_that_no_harness_saw_are_not_trained():
    async def test() -> None:
        trajectory, writer = protocols.Trajectory("task/0", "task"), doubles.Writer(echo)
        one = opened(writer, trajectory)
        first = await ask(one, user("x"))
        stream = one.reply(protocols.ChatRequest([user("x"), first.message, user("y")]))
        await anext(stream)
        await stream.aclose()
        one.close()
        assert sum(trajectory.loss_mask) == len(first.output_ids)
        assert len(trajectory.turns) == 1
        with pytest.raises(protocols.Refused, match="has ended"):
            await ask(one, user("x"))

    asyncio.run(test())


async def _scripted(one: session.RolloutSession) -> list[protocols.Reply]:
    """A harness that summarises its history and asks a child."""
    first = await ask(one, user("plan"))
    second = await ask(one, user("plan"), first.message, tool("data"))
    child = await ask(one, user("plan"), first.message, user("sub"))
    third = await ask(one, user("summary"))
    return [first, second, child, third, await ask(one, user("summary"), third.message, tool("more"))]


@pytest.mark.parametrize("cut", range(0, 140, 7))
def test_a_resumed_rollout_goes_on_from_its_tokens(cut):
    """Stopped after any number of tokens and stored, the same harness gets the same outputs, none sampled twice."""

    async def whole() -> tuple[protocols.Trajectory, list[protocols.Reply]]:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(trajectory=trajectory)
        replies = await _scripted(one)
        one.close()
        return trajectory, replies

    async def resumed() -> tuple[protocols.Trajectory, list[protocols.Reply], int]:
        trajectory, before, after = protocols.Trajectory("task/0", "task"), doubles.Writer(echo), doubles.Writer(echo)
        work = asyncio.ensure_future(_scripted(opened(before, trajectory)))
        # It has to stop between any two steps of the session, so it waits for none of its events.
        while not work.done() and sum(len(each.token_ids) for each in trajectory.segments) < cut:  # noqa: ASYNC110
            await asyncio.sleep(0)
        stored = records.decode_trajectory(records.encode_trajectory(trajectory))
        work.cancel()
        await asyncio.wait({work})
        one = opened(after, stored)
        replies = await _scripted(one)
        one.close()
        return stored, replies, len(after.asked)

    wanted, replies = asyncio.run(whole())
    found, again, asked = asyncio.run(resumed())
    assert again == replies
    assert [each.token_ids for each in found.segments] == [each.token_ids for each in wanted.segments]
    assert [each.loss_mask for each in found.segments] == [each.loss_mask for each in wanted.segments]
    assert [[turn.generated_tokens for turn in each.turns] for each in found.segments] == [
        [turn.generated_tokens for turn in each.turns] for each in wanted.segments
    ]
    assert asked <= 5


def test_a_harness_that_answers_otherwise_after_a_restart_leaves_nothing_untrue():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        await _scripted(opened(trajectory=trajectory))
        stored = records.decode_trajectory(records.encode_trajectory(trajectory))
        one = opened(trajectory=stored)
        first = await ask(one, user("plan"))
        second = await ask(one, user("plan"), first.message, tool("other data"))
        one.close()
        kept = [segment for segment in stored.segments if segment.token_ids]
        assert sum(segment.generated_tokens for segment in kept) == len(first.output_ids) + len(second.output_ids)
        assert "other data" in text_of(kept[-1])

    asyncio.run(test())


def test_segments_that_a_restart_left_behind_share_nothing():
    async def test() -> None:
        trajectory = protocols.Trajectory("task/0", "task")
        one = opened(trajectory=trajectory)
        await ask(one, user("plan"))
        child = await ask(one, user("sub task"))
        await ask(one, user("sub task"), child.message, tool("data"))
        await ask(one, user("sub task"), child.message, user("in another way"))
        assert [segment.parent and segment.parent.index for segment in trajectory.segments] == [None, 0, 1]
        stored = records.decode_trajectory(records.encode_trajectory(trajectory))
        two = opened(trajectory=stored)
        await ask(two, user("plan"))
        two.close()
        assert [len(segment.turns) for segment in stored.segments] == [1, 0, 0]
        sequences_lib.of_segments(
            stored.segments
        )  # what the trainer does first: it refuses a parent without these tokens

    asyncio.run(test())


@pytest.mark.parametrize(
    ("limits", "kind", "limit"),
    [
        ({"max_turns": 1}, "limit", "max_turns"),
        ({"rollout_tokens": 4}, "limit", "max_tokens"),
        ({"max_context": 20}, "context", "max_context"),
    ],
)
def test_a_limit_of_the_run_refuses_requests_and_is_named(limits, kind, limit):
    async def test() -> None:
        one = opened(**limits)
        first = await ask(one, user("hello"))
        with pytest.raises(protocols.Refused) as refused:
            await ask(one, user("hello"), first.message, user("a long question that fills everything"))
        assert refused.value.kind == kind
        assert one.limit == limit

    asyncio.run(test())


def test_a_harness_that_finds_room_again_has_met_no_limit():
    async def test() -> None:
        one = opened(max_context=40)
        await ask(one, user("hello"))
        with pytest.raises(protocols.Refused):
            await ask(one, user("far too long a question for this context"))
        await ask(one, user("short"))
        assert one.limit is None

    asyncio.run(test())


@pytest.mark.parametrize("messages", [(), (user("x"), protocols.Message("assistant", "y")), (user("unspeakable"),)])
def test_messages_that_no_output_can_follow_are_refused_by_name(messages):
    async def test() -> None:
        with pytest.raises(protocols.Refused) as refused:
            await ask(opened(), *messages)
        assert (refused.value.kind, refused.value.field) == ("invalid", "messages")

    asyncio.run(test())


def test_another_temperature_is_counted_or_refused():
    async def test() -> None:
        one = opened()
        await ask(one, user("x"), temperature=0.3)
        assert one.hints == {"temperature": 1}
        strict = session.RolloutSession(
            protocols.Trajectory("task/0", "task"),
            form=doubles.Characters(),
            sampler=doubles.Writer(echo),
            limits=LIMITS,
            read_status=tool_results.status,
            strict=True,
        )
        for asked in ({"temperature": 0.3}, {"hints": ["tool_choice"]}, {"options": protocols.SamplingOptions(seed=1)}):
            with pytest.raises(protocols.Refused, match=r"config\.gateway\.strict"):
                await ask(strict, user("x"), **asked)
        await ask(strict, user("x"), temperature=1.0)

    asyncio.run(test())


def test_an_error_of_the_engines_breaks_the_session():
    class Broken(doubles.Writer):
        async def sample(self, segment, sampling, on_tokens=None):
            raise protocols.WorkerLost("no engine is left")

    async def test() -> None:
        one = opened(Broken(echo))
        with pytest.raises(protocols.WorkerLost):
            await ask(one, user("x"))
        assert isinstance(one.broken.result(), protocols.WorkerLost)

    asyncio.run(test())


def test_a_return_that_names_an_error_tells_it_to_the_scheduler():
    async def test() -> None:
        trajectory, writer = protocols.Trajectory("task/0", "task"), doubles.Writer(echo)
        one = opened(writer, trajectory, max_context=2_000)
        first = await ask(one, user("hello"))
        await ask(one, user("hello"), first.message, tool("Traceback (most recent call last):\nImportError: no"))
        one.close()
        (told,) = [what for _, what in writer.events if isinstance(what, protocols.CausalState)]
        assert (told.status, told.call, told.error) == ("failure", "", "ImportError")
        assert (trajectory.turns[0].call, trajectory.turns[0].error) == ("", "ImportError")

    asyncio.run(test())
