"""Serving a policy outside of training: any client, any temperature, until a signal."""

from __future__ import annotations

import asyncio
import os
import signal

import coordinator_doubles as doubles
import openai
import pytest

from libra_jax import protocols
from libra_jax.chat import chat_format, tokenizers
from libra_jax.cluster import inprocess
from libra_jax.coordinator import evaluation, parts
from libra_jax.harness.gateway import fronts
from libra_jax.rollouts import harness_loop, rollouts, streams
from libra_jax.scheduling import registry
from libra_jax.telemetry import memory


def serve(workdir, test) -> None:
    """Serves fake engines, runs `test` with the address, and ends the server by SIGINT."""

    async def main() -> None:
        config = doubles.make_config(evaluation={"temperature": 0.5})
        cluster = inprocess.InProcessCluster(shutdown_seconds=5.0)
        context = parts.CoordinatorContext(config, cluster, memory.MemoryRecorder(), workdir)
        tokenizer = tokenizers.CharacterTokenizer()
        agent = rollouts.Agent(
            tasks=doubles.Tasks(),
            make_environment=doubles.TwoTurns,
            tokenizer=tokenizer,
            host=harness_loop.SessionResources(
                fronts.Fronts(context, "policy"), lambda: chat_format.CharacterFormat(tokenizer)
            ),
        )
        specs = parts.WorkerSpecs(
            protocols.ActorSpec("trainer", "coordinator_doubles:make_trainer", {}), doubles.engine_specs(config)
        )
        told: asyncio.Queue[protocols.Endpoint] = asyncio.Queue()

        async def client() -> None:
            endpoint = await told.get()
            try:
                async with openai.AsyncOpenAI(
                    base_url=endpoint.url,
                    api_key=endpoint.secret,
                    max_retries=0,
                    http_client=openai.DefaultAsyncHttpxClient(verify=False),
                ) as model:
                    await test(model)
            finally:
                os.kill(os.getpid(), signal.SIGINT)

        asking = asyncio.ensure_future(client())
        try:
            await evaluation.serve_alone(
                context,
                specs,
                agent,
                registry.create(config.scheduler),
                checkpoint=None,
                secret="",
                ready=told.put_nowait,
            )
        finally:
            await asking
            await cluster.shutdown()

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_a_served_policy_answers_dialogues_of_any_client_at_their_temperature(tmp_path):
    async def test(model: openai.AsyncOpenAI) -> None:
        say = {"role": "user", "content": "hello"}
        first = await model.chat.completions.create(model="any", messages=[say], temperature=0.0)
        content = first.choices[0].message.content
        again = await model.chat.completions.create(model="any", messages=[say])
        assert again.choices[0].message.content == content, "the double's words follow from the context"
        longer = [say, {"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
        answers = await asyncio.gather(
            *(model.chat.completions.create(model="any", messages=longer) for _ in range(12))
        )
        assert {answer.usage.completion_tokens > 0 for answer in answers} == {True}
        assert answers[0].usage.prompt_tokens > first.usage.prompt_tokens
        with pytest.raises(openai.BadRequestError) as refused:
            await model.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * 400}])
        assert refused.value.code == "context_length_exceeded"

    serve(tmp_path, test)


def test_what_a_server_cannot_honour_is_refused_by_name(tmp_path):
    async def test(model: openai.AsyncOpenAI) -> None:
        say = {"role": "user", "content": "hello"}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        for asked, field in (
            ({"seed": 7}, "seed"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"tools": [tool]}, "tools"),  # the characters' template writes none
        ):
            with pytest.raises(openai.BadRequestError, match=f"^.*{field}: ") as refused:
                await model.chat.completions.create(model="any", messages=[say], **asked)
            assert refused.value.param == field

    serve(tmp_path, test)


def test_tools_that_the_template_refuses_are_refused_by_name(tmp_path, monkeypatch):
    def refuse(self, messages, tools=()):
        raise protocols.DataError("the chat template refuses these messages: no type")

    async def test(model: openai.AsyncOpenAI) -> None:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        monkeypatch.setattr(chat_format.CharacterFormat, "render", refuse)
        with pytest.raises(openai.BadRequestError, match="the chat template refuses") as refused:
            await model.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "hello"}], tools=[tool]
            )
        assert refused.value.param == "tools"

    serve(tmp_path, test)


def test_a_served_policy_samples_as_each_request_asks(tmp_path, monkeypatch):
    asked: list[protocols.SamplingParams] = []
    sample = streams.Streams.sample

    async def noted(self, segment, sampling, on_tokens=None):
        asked.append(sampling)
        return await sample(self, segment, sampling, on_tokens)

    monkeypatch.setattr(streams.Streams, "sample", noted)

    async def test(model: openai.AsyncOpenAI) -> None:
        say = {"role": "user", "content": "hello"}
        more = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
        await model.chat.completions.create(
            model="any", messages=[say], top_p=0.9, presence_penalty=0.5, frequency_penalty=0, extra_body=more
        )
        await model.chat.completions.create(model="any", messages=[say])

    serve(tmp_path, test)
    assert asked[0].options == protocols.SamplingOptions(0.9, 20, 0.05, None, 0.5, 1.1)
    assert asked[1].options == protocols.NO_OPTIONS
