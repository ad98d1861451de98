"""The same rollouts through sessions as through the native loop: the same tokens, decisions and predictions."""

from __future__ import annotations

import pathlib

import coordinator_doubles as doubles
import pytest
import session_doubles
import stepwise_policy
import test_stepwise_routing as stepwise

from libra_jax import protocols
from libra_jax.chat import chat_format
from libra_jax.harness import openai_loop
from libra_jax.rollouts import factories, harness_loop


class Stepping:
    """A harness that steps the native environment, and asks its session without HTTP."""

    def __init__(self, gateway: session_doubles.Directly, world: protocols.Environment) -> None:
        self._gateway, self._world = gateway, world

    status = staticmethod(openai_loop.status)

    async def run(self, task: protocols.Task, endpoint: protocols.Endpoint) -> protocols.Outcome:
        conversation = self._gateway.open_now[endpoint.secret]
        messages = list(await self._world.reset(task))
        while True:
            async for item in conversation.reply(protocols.ChatRequest(messages)):
                reply = item
            if reply.finish == "length":
                return protocols.Outcome(0.0)
            result = await self._world.step(reply.message.content)
            if result.done:
                return protocols.Outcome(result.reward)
            messages.append(reply.message)
            messages += [
                protocols.Message("tool", answer.content, tool_call_id=answer.tool) for answer in result.tool_returns
            ]

    async def close(self) -> None:
        await self._world.close()


def outcome(policy: str, workdir: pathlib.Path, *, harness: bool):
    """Returns the scalars of routing by step, and each rollout's turns, of a run whose policy solves every task."""
    config = stepwise.make_config(policy)
    native = factories.environment_factory(config.task)
    gateway = session_doubles.Directly()
    host = harness_loop.SessionResources(gateway, lambda: chat_format.CharacterFormat(stepwise_policy.TOKENIZER))
    bench = doubles.Bench(
        config,
        workdir,
        specs=stepwise.engine_specs(config.rollout),
        make_environment=(lambda: Stepping(gateway, native())) if harness else native,
        tasks=factories.task_source(config.task, config.seed),
        tokenizer=stepwise_policy.TOKENIZER,
        host=host,
    )
    bench.run()
    kept = ("routing/", "prediction", "tool/", "reward/", "tokens/mean", "turns/", "segments/")
    steps = [
        {name: value for name, value in scalars.items() if name.startswith(kept) and "seconds" not in name}
        for _, scalars in bench.recorder.steps
    ]
    turns = {
        record["trajectory_id"]: [
            (turn["generated_tokens"], turn["tool"], turn["status"], turn["payload_tokens"], len(turn.get("moves", ())))
            for turn in record["turns"]
        ]
        for record in bench.recorder.trajectories
    }
    return steps, turns


def test_sessions_are_routed_exactly_as_native_rollouts_by_the_published_rule(tmp_path):
    native = outcome("cmlfq_paper", tmp_path / "native", harness=False)
    sessions = outcome("cmlfq_paper", tmp_path / "harness", harness=True)
    assert native[0][-1]["routing/judged"] == 256
    assert sessions == native


def test_sessions_are_routed_as_well_as_native_rollouts(tmp_path):
    """By loads of the moment, too: two requests of one moment may come in another order, and a few moves differ."""
    native, native_turns = outcome("cmlfq", tmp_path / "native", harness=False)
    sessions, session_turns = outcome("cmlfq", tmp_path / "harness", harness=True)

    def without_moves(turns):
        return {name: [turn[:-1] for turn in each] for name, each in turns.items()}

    assert without_moves(session_turns) == without_moves(native_turns)
    for before, after in zip(native, sessions, strict=True):
        assert after["routing/judged"] == before["routing/judged"] == 256
        assert after["routing/one_shot_accuracy"] == pytest.approx(before["routing/one_shot_accuracy"], abs=0.02)
    # Over the run: a step has some 30 moves, and those of one moment fall on either side of it.
    moves = [sum(step["routing/moves"] for step in steps) for steps in (native, sessions)]
    assert moves[1] == pytest.approx(moves[0], rel=0.1)
    assert moves[0] > 100
