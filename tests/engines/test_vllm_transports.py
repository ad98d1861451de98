"""The transports that need CUDA, as far as they go without it: weights from the trainer to an engine."""

import dataclasses
import threading

import pytest
import torch
import vllm
import vllm.platforms
import vllm_host

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import vllm_engine, vllm_requests, vllm_weight_sender
from libra_jax.models import config as models_config
from libra_jax.weights import create

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_an_instance_on_another_accelerator_than_the_config_names_is_refused(monkeypatch):
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: False, raising=False)
    monkeypatch.setattr(
        vllm.platforms.current_platform, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3", raising=False
    )
    vllm_engine._check_accelerator("engine-3", "h100")
    vllm_engine._check_accelerator("engine-3", "")
    with pytest.raises(protocols.ConfigError, match=r"accelerators: 'h20' is named for engine-3, .* name 'h100' there"):
        vllm_engine._check_accelerator("engine-3", "h20")


def test_a_requests_own_settings_reach_vllm_and_a_runs_requests_have_none():
    plain = protocols.SamplingParams(1.0, 8, (2,))
    options = protocols.SamplingOptions(top_p=0.9, top_k=20, presence_penalty=0.5, seed=3, schema="{}")
    made = vllm_requests.sampling_params(dataclasses.replace(plain, options=options), 100)
    assert (made.top_p, made.top_k, made.presence_penalty) == (0.9, 20, 0.5)
    assert (made.seed, made.structured_outputs) == (None, None)
    trained = vllm_requests.sampling_params(plain, 100)
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
