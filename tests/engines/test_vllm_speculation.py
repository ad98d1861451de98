"""A real vLLM engine that speculates by n-grams, caches prefixes and prefills in chunks, against the references."""

import asyncio
import itertools

import numpy as np
import pytest
import torch
import vllm_host

from libra_jax.engines import vllm_requests

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = tuple(prompt * 16 for prompt in vllm_host.PROMPTS)
"""The last of their tokens have come before, so drafts begin at once; the longest is prefilled in two chunks."""


@pytest.fixture(scope="module")
def host():
    made = vllm_host.Host(
        1,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
        per_request_spec_decode_metrics="summary",
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=64,
    )
    yield made
    made.close()


@pytest.fixture
def accepted(monkeypatch):
    """Counts of the drafts that the engine accepted, one for each finished request."""
    counts, delta = [], vllm_requests.delta

    def count(completion, *rest):
        if completion.finish_reason is not None:
            steps = completion.spec_decode_metrics.histogram  # steps with 0, 1, 2, ... accepted drafts
            counts.append(sum(count * number for count, number in enumerate(steps)))
        return delta(completion, *rest)

    monkeypatch.setattr(vllm_requests, "delta", count)
    return counts


def test_log_probs_are_the_references_and_tokens_have_their_distribution(host, accepted):
    params = vllm_host.random_params(host.shape, seed=10)
    model = vllm_host.reference_model(host.shape, params)
    temperature = 0.7

    async def body():
        version = await host.sync(host.shape, params)
        return version, await asyncio.gather(*(host.sample(prompt, temperature, 150) for prompt in PROMPTS * 4))

    version, outputs = host.run(body())
    # Sums of differences whose expectation is 0 if each token is drawn from the reference's distribution. They are of
    # the token's log-prob, and of whether the token followed the last token's previous occurrence, as a draft does.
    sums, variances = np.zeros(2), np.zeros(2)
    for prompt, deltas in zip(PROMPTS * 4, outputs, strict=True):
        tokens, log_probs, versions = vllm_host.flatten(deltas)
        assert (deltas[-1].finish_reason, len(tokens), set(versions)) == ("length", 150, {version})
        whole = [*prompt, *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1] / temperature
        scores = torch.log_softmax(logits.double(), -1).numpy()
        np.testing.assert_allclose(log_probs, scores[np.arange(150), tokens], atol=vllm_host.TOLERANCE)
        for row, token in enumerate(tokens):
            before = whole[: len(prompt) + row]
            drafts = [after for last, after in itertools.pairwise(before) if last == before[-1]]
            values = np.stack([scores[row], np.arange(scores.shape[1]) == (drafts[-1] if drafts else -1)])
            chances = np.exp(scores[row])
            means = values @ chances
            sums += values[:, token] - means
            variances += values**2 @ chances - means**2
    assert sum(accepted) > 100
    assert np.abs(sums / np.sqrt(variances)).max() < 5


def test_on_an_in_flight_update_every_token_has_the_log_prob_of_the_version_on_it(host, accepted):
    held = {host.version + 1: 30, host.version + 2: 31}
    held = {version: vllm_host.random_params(host.shape, seed=seed) for version, seed in held.items()}

    async def body():
        first, second = held.values()
        await host.sync(host.shape, first)
        streams = await host.begin(PROMPTS * 4, 170)
        await host.sync(host.shape, second)
        return await asyncio.gather(*streams)

    mixed = 0
    for prompt, deltas in zip(PROMPTS * 4, host.run(body()), strict=True):
        tokens, log_probs, versions = vllm_host.flatten(deltas)
        assert versions == sorted(versions)
        mixed += set(versions) == set(held)
        whole = [*prompt, *tokens]
        scores = {version: vllm_host.our_log_probs(host.shape, params, whole, 1.0) for version, params in held.items()}
        rows = range(len(prompt) - 1, len(whole) - 1)
        expected = [scores[version][row, token] for version, row, token in zip(versions, rows, tokens, strict=True)]
        np.testing.assert_allclose(log_probs, expected, atol=vllm_host.TOLERANCE)
    assert mixed > 0
    assert sum(accepted) > 100


def test_a_draft_that_goes_on_after_a_stop_token_is_cut_off_there(host, accepted):
    params = vllm_host.random_params(host.shape, seed=40)

    async def body():
        await host.sync(host.shape, params)
        return await asyncio.gather(*(host.sample(prompt, 1.0, 170, tuple(range(8))) for prompt in PROMPTS * 4))

    for deltas in host.run(body()):
        tokens, log_probs, versions = vllm_host.flatten(deltas)
        assert len(tokens) == len(log_probs) == len(versions)
        assert deltas[-1].finish_reason == "length" or tokens[-1] < 8
        assert all(token >= 8 for token in tokens[:-1])
    assert sum(accepted) > 0
