"""A Qwen3-MoE that vLLM serves: its tokens have the trainer's log-probabilities, after an update, too."""

import asyncio
import dataclasses

import numpy as np
import pytest
import vllm_host

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
    made = vllm_host.Host(1, SHAPE)
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
