"""The transports that need CUDA, as far as they go without it: keys and values between engines, weights to one."""

import asyncio
import dataclasses
import importlib.util
import os
import threading
import types

import pytest
import torch
import vllm
import vllm.platforms
import vllm_host

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import vllm_engine, vllm_launch, vllm_requests, vllm_weight_sender
from libra_jax.models import config as models_config
from libra_jax.weights import create

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_transfer_of_keys_and_values_without_cuda_is_refused_by_field():
    rollout = config_lib.to_dict(dataclasses.replace(vllm_host.ROLLOUT, kv_transfer="nixl"))
    with pytest.raises(protocols.ConfigError, match=r"rollout.kv_transfer: 'nixl' needs CUDA.*use 'none'"):
        vllm_engine.create("remote", models_config.to_hf(vllm_host.QWEN3), rollout, 1, seed=0)


def test_a_transfer_without_its_package_is_refused_by_field(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "nixl" else find(name, *rest))
    rollout = config_lib.to_dict(dataclasses.replace(vllm_host.ROLLOUT, kv_transfer="nixl"))
    with pytest.raises(protocols.ConfigError, match=r"rollout\.kv_transfer: the nixl package is not installed"):
        vllm_engine.create("remote", models_config.to_hf(vllm_host.QWEN3), rollout, 1, seed=0)


def test_an_instance_on_another_accelerator_than_the_config_names_is_refused(monkeypatch):
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: False, raising=False)
    monkeypatch.setattr(
        vllm.platforms.current_platform, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3", raising=False
    )
    vllm_engine._check_accelerator("engine-3", "h100")
    vllm_engine._check_accelerator("engine-3", "")
    with pytest.raises(protocols.ConfigError, match=r"accelerators: 'h20' is named for engine-3, .* name 'h100' there"):
        vllm_engine._check_accelerator("engine-3", "h20")


PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def started_with(monkeypatch, rollout: config_lib.RolloutConfig) -> tuple[object, str | None]:
    """The connector and the port with which vLLM would be started; it is not started."""
    seen = []

    def refuse(arguments, **_):
        seen.append((arguments.kv_transfer_config, os.environ.get(PORT)))
        raise RuntimeError("not in this test")

    monkeypatch.setattr(vllm_launch.async_llm.AsyncLLM, "from_engine_args", refuse)
    launch = vllm_launch.Launch("remote", models_config.to_hf(vllm_host.QWEN3), rollout, 1, 0, "nobind", "")
    with pytest.raises(protocols.WorkerLost, match="engine remote did not start: RuntimeError: not in this test"):
        launch.start()
    assert PORT not in os.environ
    return seen[0]


def test_a_transfer_is_vllms_own_connector_at_a_free_port(monkeypatch):
    rollout = dataclasses.replace(vllm_host.ROLLOUT, kv_transfer="nixl")
    connector, port = started_with(monkeypatch, rollout)
    assert (connector.kv_connector, connector.is_kv_producer, connector.is_kv_consumer) == ("NixlConnector", True, True)
    assert 1024 < int(port) < 65536
    assert started_with(monkeypatch, vllm_host.ROLLOUT) == (None, None)


class Keeping:
    """Stands for a vLLM that keeps a context's keys and values."""

    async def generate(self, prompt, params, request_id, lora_request):
        self.asked = params
        yield types.SimpleNamespace(kv_transfer_params={"remote_port": 7})


def test_keys_and_values_are_kept_by_one_request_and_taken_by_the_next():
    async def hand_over():
        rollout = config_lib.to_dict(vllm_host.ROLLOUT)
        engine = vllm_engine.create("giving", models_config.to_hf(vllm_host.QWEN3), rollout, 1, seed=0)
        engine._engine, engine._death = Keeping(), asyncio.get_running_loop().create_future()
        request = protocols.GenerationRequest("a", (5, 6), protocols.SamplingParams(1.0, 8, ()))
        return await engine.hand_over(request), engine._engine.asked

    source, giving = asyncio.run(hand_over())
    assert source == {"remote_port": 7}
    assert (giving.max_tokens, giving.extra_args["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    sampling = protocols.SamplingParams(1.0, 8, ())
    taking = vllm_requests.sampling_params(sampling, 100, source)
    assert taking.extra_args == {"kv_transfer_params": {"remote_port": 7}}
    assert vllm_requests.sampling_params(sampling, 100, None).extra_args is None


def test_a_requests_own_settings_reach_vllm_and_a_runs_requests_have_none():
    plain = protocols.SamplingParams(1.0, 8, (2,))
    options = protocols.SamplingOptions(top_p=0.9, top_k=20, presence_penalty=0.5, seed=3, schema="{}")
    made = vllm_requests.sampling_params(dataclasses.replace(plain, options=options), 100, None)
    assert (made.top_p, made.top_k, made.presence_penalty) == (0.9, 20, 0.5)
    assert (made.seed, made.structured_outputs) == (None, None)
    trained = vllm_requests.sampling_params(plain, 100, None)
    assert (trained.top_p, trained.top_k, trained.presence_penalty, trained.min_p) == (1.0, 0, 0.0, 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_cuda_transport_without_cuda_is_refused_by_field(transport):
    rollout = config_lib.to_dict(dataclasses.replace(vllm_host.ROLLOUT, transport=transport))
    with pytest.raises(protocols.ConfigError, match=f"rollout.transport: '{transport}' needs CUDA"):
        vllm_engine.create("remote", models_config.to_hf(vllm_host.QWEN3), rollout, 1, seed=0)
    with pytest.raises(protocols.ConfigError, match=f"rollout.transport: '{transport}' needs CUDA"):
        create.create(vllm_host.QWEN3, "float32", 1 << 20, transport, False, 300.0, "127.0.0.1")


class Connected:
    """Stands for vLLM's trainer engine once the receiving workers have joined."""

    sent = 0

    def send_weights(self) -> None:
        self.sent += 1


class Norm:
    """A model of one tensor."""

    def metadata(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [("model.norm.weight", torch.float32, torch.Size([3]))]

    def tensors(self):
        yield "model.norm.weight", torch.ones(3)


def test_an_engine_that_never_joins_is_a_sentence_and_one_that_joins_late_is_served(monkeypatch):
    joined, engine = threading.Event(), Connected()

    def connect(info: object, client: object, source: object) -> Connected:
        joined.wait(30)
        return engine

    monkeypatch.setattr(vllm_weight_sender.factory.WeightTransferTrainerFactory, "trainer_init", connect)
    sender = vllm_weight_sender.Sender("nccl", torch.device("cpu"), 0, 0.2, "127.0.0.1", 1 << 20)
    members = [protocols.WeightDestination("a", 2, 0), protocols.WeightDestination("b", 1, 0)]
    address = sender.begin(Norm(), members)["instances"]
    assert [address[name]["init_info"]["rank_offset"] for name in "ab"] == [1, 3]
    assert (address["a"]["init_info"]["world_size"], address["b"]["update_info"]["shapes"]) == (4, [[3]])
    with pytest.raises(protocols.DeadlineMissed, match=r"over nccl, within 0\.2 s.*config\.deadlines\.weight_sync"):
        sender.end()
    joined.set()
    sender.end()
    assert engine.sent == 1
