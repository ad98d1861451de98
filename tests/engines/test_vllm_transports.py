"""The transports that need CUDA, as far as they go without it: keys and values between engines, weights to one."""

import dataclasses
import importlib.util
import threading

import pytest
import torch
import vllm_host

from libra_jax import config, protocols
from libra_jax.engines import vllm_engine, vllm_kv_transfer, vllm_weight_sender
from libra_jax.models import config as models_config
from libra_jax.weights import snapshot

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_transfer_of_keys_and_values_without_cuda_is_refused_by_field():
    rollout = config.to_dict(dataclasses.replace(vllm_host.ROLLOUT, kv_transfer="nixl"))
    with pytest.raises(protocols.ConfigError, match=r"rollout.kv_transfer: 'nixl' needs CUDA.*use 'none'"):
        vllm_engine.create("remote", models_config.to_hf(vllm_host.QWEN3), rollout, 1, seed=0)


def test_a_transfer_without_its_package_is_refused_by_field(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(protocols.ConfigError, match=r"rollout\.kv_transfer: the nixl package is not installed"):
        vllm_kv_transfer.check(dataclasses.replace(vllm_host.ROLLOUT, kv_transfer="nixl"))


def test_a_transfer_is_vllms_own_connector_and_its_parameters_go_with_the_request():
    rollout = dataclasses.replace(vllm_host.ROLLOUT, kv_transfer="nixl")
    connector = vllm_kv_transfer.engine_arguments(rollout)["kv_transfer_config"]
    assert (connector.kv_connector, connector.is_kv_producer, connector.is_kv_consumer) == ("NixlConnector", True, True)
    ports = {vllm_kv_transfer.variables(rollout)["VLLM_NIXL_SIDE_CHANNEL_PORT"] for _ in range(3)}
    assert all(1024 < int(port) < 65536 for port in ports)
    giving = vllm_kv_transfer.giving()
    assert (giving.max_tokens, giving.extra_args["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert vllm_kv_transfer.taking({"remote_port": 7}) == {"kv_transfer_params": {"remote_port": 7}}
    assert vllm_kv_transfer.taking(None) is None
    assert not vllm_kv_transfer.engine_arguments(vllm_host.ROLLOUT)
    assert not vllm_kv_transfer.variables(vllm_host.ROLLOUT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_cuda_transport_without_cuda_is_refused_by_field(transport):
    rollout = config.to_dict(dataclasses.replace(vllm_host.ROLLOUT, transport=transport))
    with pytest.raises(protocols.ConfigError, match=f"rollout.transport: '{transport}' needs CUDA"):
        vllm_engine.create("remote", models_config.to_hf(vllm_host.QWEN3), rollout, 1, seed=0)
    with pytest.raises(protocols.ConfigError, match=f"rollout.transport: '{transport}' needs CUDA"):
        snapshot.create(vllm_host.QWEN3, "float32", 1 << 20, transport, False, (1,), 300.0)


class Connected:
    """Stands for vLLM's trainer engine once the receiving workers have joined."""

    sent = 0

    def send_weights(self) -> None:
        self.sent += 1


def test_an_engine_that_never_joins_is_a_sentence_and_one_that_joins_late_is_served(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    joined, engine = threading.Event(), Connected()

    def connect(sender: vllm_weight_sender.Sender, info: object) -> Connected:
        joined.wait(30)
        return engine

    monkeypatch.setattr(vllm_weight_sender.Sender, "_connect", connect)
    sender = vllm_weight_sender.Sender("nccl", workers=2, seconds=0.2)
    address = sender.begin([("model.norm.weight", torch.ones(3))])
    assert (address["init_info"]["world_size"], address["update_info"]["shapes"]) == (3, [[3]])
    with pytest.raises(protocols.DeadlineMissed, match=r"over nccl, within 0\.2 s.*config\.deadlines\.weight_sync"):
        sender.end()
    joined.set()
    sender.end()
    assert engine.sent == 1
