"""What the tests of real vLLM engines share: an engine with its event loop, our own scoring and transformers'."""

import asyncio
import dataclasses
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import transformers

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import vllm_engine
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.weights import snapshot

CORE = max(os.sched_getaffinity(0))
"""The core of the engine of a single worker."""

TOLERANCE = 1e-3
CONTEXT = 256
PROMPTS = ((5, 6, 7, 8), (9, 3, 4), (20, 30, 40, 50, 60), (11, 11))
QWEN3 = dataclasses.replace(models_config.load_preset("libra-tiny"), num_layers=2, vocab_size=104)
QWEN2 = dataclasses.replace(QWEN3, architecture="qwen2", qk_norm=False, qkv_bias=True, hidden_size=128)
SHAPES = {1: QWEN3, 2: QWEN2}  # vLLM takes head_dim from hidden_size here: 128 / 4, of which its CPU kernels have 32.
ROLLOUT = config_lib.RolloutConfig(
    max_context=CONTEXT, max_tokens=CONTEXT - 8, slots=16, kv_cache_gib=0.1, chunk_mib=1, checksum=True
)


class Host:
    """An engine, and the event loop that it lives on between tests."""

    def __init__(
        self,
        tensor_parallel: int,
        shape: models_config.TransformerConfig | None = None,
        return_routing: bool = False,
        lora: config_lib.LoraConfig | None = None,
        **engine_arguments,
    ):
        self.loop = asyncio.new_event_loop()
        self.shape = shape or SHAPES[tensor_parallel]
        self.version = 0
        self.engine = vllm_engine.create(
            f"tp{tensor_parallel}",
            models_config.to_hf(self.shape),
            config_lib.to_dict(dataclasses.replace(ROLLOUT, engine_arguments=engine_arguments)),
            tensor_parallel,
            seed=0,
            cpu_cores=str(CORE) if tensor_parallel == 1 else "auto",
            return_routing=return_routing,
            lora=config_lib.to_dict(lora) if lora else None,
        )
        self.info = self.run(self.engine.start())
        self.run(self.engine.init_weight_transfer({"kind": "memfd"}))

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    async def sync(self, shape: models_config.TransformerConfig, params: dict) -> int:
        """Publishes as the coordinator does; returns the version."""
        publisher = snapshot.HostSnapshot(shape, "float32", 200_000, True)
        await self.load(publisher, params)
        publisher.shutdown()
        return self.version

    async def load(self, publisher, params: dict) -> int:
        """Sends the next version with a publisher; returns the bytes that reached vLLM's workers."""
        self.version += 1
        count = publisher.open(self.version, params)
        assert count > 2
        front_end, sent = self.engine._serving(), 0
        update_weights = front_end.update_weights

        async def counted(request):
            nonlocal sent
            sent += request.update_info["nbytes"]
            await update_weights(request)

        front_end.update_weights = counted
        await self.engine.pause()
        await self.engine.start_weight_update(self.version)
        for index in range(count):
            await self.engine.update_weights(publisher.stage(self.version, index))
        await self.engine.finish_weight_update(self.version)
        await self.engine.resume()
        del front_end.update_weights
        return sent

    async def sample(
        self,
        prompt: tuple[int, ...],
        temperature: float,
        max_tokens: int,
        stops: tuple[int, ...] = (),
        begun: asyncio.Event | None = None,
    ) -> list[protocols.TokenDelta]:
        sampling = protocols.SamplingParams(temperature, max_tokens, stops)
        deltas = []
        async for delta in self.engine.generate(protocols.GenerationRequest(f"request-{prompt}", prompt, sampling)):
            deltas.append(delta)
            if begun is not None:
                begun.set()
        return deltas

    async def begin(self, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> list[asyncio.Task]:
        """Requests that have all begun to decode, and are far from done."""
        begun = [asyncio.Event() for _ in prompts]
        tasks = [
            asyncio.ensure_future(self.sample(prompt, 1.0, max_tokens, begun=event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        return tasks

    def close(self) -> None:
        self.run(self.engine.shutdown())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


def with_tying(shape: models_config.TransformerConfig, tied: bool) -> models_config.TransformerConfig:
    return dataclasses.replace(shape, tie_word_embeddings=tied)


def random_params(shape: models_config.TransformerConfig, seed: int) -> dict:
    """Parameters under which tokens differ in probability, biases and norms included."""
    params = transformer.init_params(shape, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 100), len(leaves))
    noisy = [leaf + 0.15 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@functools.cache
def scorer(shape: models_config.TransformerConfig):
    @jax.jit
    def score(params, tokens_1xT):
        positions = jnp.arange(CONTEXT)[None]
        segments = jnp.ones_like(tokens_1xT)
        hidden = transformer.forward(params, shape, transformer.ComputeOptions(), tokens_1xT, positions, segments)
        return (hidden @ transformer.unembedding(params, shape))[0]

    return score


def our_log_probs(shape, params, tokens: list[int], temperature: float) -> np.ndarray:
    """[T, V]: row t is the distribution of token t + 1, as the trainer scores it."""
    padded = jnp.array([tokens + [0] * (CONTEXT - len(tokens))])
    return np.asarray(jax.nn.log_softmax(scorer(shape)(params, padded) / temperature))[: len(tokens)]


def reference_model(shape, params) -> transformers.PreTrainedModel:
    hf_config = transformers.AutoConfig.for_model(**models_config.to_hf(shape))
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    state = {}
    for entry in snapshot.wire_entries(shape):
        leaf = params
        for key in entry.path:
            leaf = leaf[key]
        tensor = snapshot.to_torch(leaf)
        state[entry.hf_name] = (tensor if entry.layer is None else tensor[entry.layer]).clone()
    model.load_state_dict(state)
    return model


def flatten(deltas: list[protocols.TokenDelta]) -> tuple[list[int], list[float], list[int]]:
    assert all(len(d.token_ids) == len(d.log_probs) == len(d.policy_versions) for d in deltas)
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return (
        [token for delta in deltas for token in delta.token_ids],
        [value for delta in deltas for value in delta.log_probs],
        [version for delta in deltas for version in delta.policy_versions],
    )


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()
