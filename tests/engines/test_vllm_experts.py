"""A Qwen3-MoE that vLLM serves: its tokens have the trainer's log-probabilities and transformers' experts."""

import asyncio
import dataclasses
import tempfile

import numpy as np
import pytest
import torch
import transformers
import vllm_host

from libra_jax import protocols
from libra_jax.models.hf import hf

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SHAPE = dataclasses.replace(
    vllm_host.QWEN3,
    architecture="qwen3_moe",
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=32,
    normalize_expert_shares=True,
)


@pytest.fixture(scope="module")
def host():
    made = vllm_host.Host(1, SHAPE, return_routing=True)
    yield made
    made.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_returned_log_probs_are_the_trainers(host, seed):
    params = vllm_host.random_params(SHAPE, seed)

    async def body():
        await host.sync(SHAPE, params)
        return await asyncio.gather(*(host.sample(prompt, 1.0, 48) for prompt in vllm_host.PROMPTS))

    for prompt, deltas in zip(vllm_host.PROMPTS, host.run(body()), strict=True):
        tokens, log_probs, _ = vllm_host.flatten(deltas)
        whole = [*prompt, *tokens]
        rows = np.arange(len(prompt) - 1, len(whole) - 1)
        ours = vllm_host.our_log_probs(SHAPE, params, whole, 1.0)[rows, tokens]
        np.testing.assert_allclose(log_probs, ours, atol=vllm_host.TOLERANCE)


def _experts(params, tokens):
    """The experts that transformers' routers choose, [tokens, layers * 2], sorted within a layer."""
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        hf.save(params, SHAPE, directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
        found = model(torch.tensor([tokens]), output_router_logits=True)
    chosen = torch.stack([logits.topk(2).indices.sort().values for logits in found.router_logits], dim=1)
    return chosen.flatten(1).numpy()


def _returned(rows):
    found = np.array([np.frombuffer(row, np.uint8) for row in rows]).reshape(-1, SHAPE.num_layers, 2)
    return np.sort(found, axis=-1).reshape(len(rows), -1)


def _request(name, trajectory, most):
    """What the coordinator asks to continue a trajectory."""
    sampling = protocols.SamplingParams(1.0, most, ())
    return protocols.GenerationRequest(name, trajectory.context(), sampling, routed_tokens=len(trajectory.routing))


async def _continue(host, name, trajectory, most, leave_after=None):
    """Appends what the engine samples; leaves the stream after some tokens."""
    stream = host.engine.generate(_request(name, trajectory, most))
    first = len(trajectory.token_ids)
    async for delta in stream:
        trajectory.append_sampled(delta)
        if leave_after is not None and len(trajectory.token_ids) - first >= leave_after:
            break
    await stream.aclose()


@pytest.mark.parametrize("leave_after", [None, 5], ids=["to-the-end", "moved-away"])
def test_every_token_but_the_last_has_the_experts_of_transformers(host, leave_after):
    """Over two turns, with a tool's return between them, whose context the engine has cached."""
    params = vllm_host.random_params(SHAPE, 3)
    made = [protocols.Trajectory(f"t/{number}", "t") for number in range(4)]

    async def turns():
        await host.sync(SHAPE, params)
        for trajectory, prompt in zip(made, vllm_host.PROMPTS, strict=True):
            trajectory.append_text(prompt, protocols.TokenSource.PROMPT)
        names = [f"{leave_after}-{number}" for number in range(4)]
        await asyncio.gather(*(_continue(host, f"a{n}", t, 40, leave_after) for n, t in zip(names, made, strict=True)))
        for trajectory in made:
            assert len(trajectory.routing) == len(trajectory.token_ids) - 1
            trajectory.append_text((7, 8, 9), protocols.TokenSource.TOOL)
        await asyncio.gather(*(_continue(host, f"b{n}", t, 20) for n, t in zip(names, made, strict=True)))

    host.run(turns())
    for trajectory in made:
        assert len(trajectory.routing) == len(trajectory.token_ids) - 1
        np.testing.assert_array_equal(_returned(trajectory.routing), _experts(params, trajectory.token_ids)[:-1])


def test_tokens_keep_the_experts_of_the_version_that_took_them(host):
    """An update in the middle of a request: tokens before it keep the old model's experts, later ones have the new."""
    old, new = vllm_host.random_params(SHAPE, 4), vllm_host.random_params(SHAPE, 5)
    trajectory = protocols.Trajectory("t/0", "t")
    trajectory.append_text(vllm_host.PROMPTS[2], protocols.TokenSource.PROMPT)

    async def update():
        await host.sync(SHAPE, old)
        begun = asyncio.Event()

        async def run():
            async for delta in host.engine.generate(_request("crossing", trajectory, 200)):
                trajectory.append_sampled(delta)
                begun.set()

        task = asyncio.ensure_future(run())
        await begun.wait()
        await host.sync(SHAPE, new)
        await task

    host.run(update())
    versions = np.array(trajectory.policy_versions)
    assert len(trajectory.routing) == len(trajectory.token_ids) - 1
    found = _returned(trajectory.routing)
    # The experts of a token are those of the version that sampled the next one from it.
    before = versions[1:] < host.version
    assert before.any()
    assert not before.all()
    whole = trajectory.token_ids
    np.testing.assert_array_equal(found[before], _experts(old, whole)[:-1][before])
    np.testing.assert_array_equal(found[~before], _experts(new, whole)[:-1][~before])
