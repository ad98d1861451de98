"""The policy's adapter in vLLM's LoRA runtime, kept in a worker's memory instead of files.

Written against vLLM 0.32 (vllm/lora/worker_manager.py). vLLM loads an adapter from a directory when a request that
names it is first scheduled, and drops all adapters at the end of each weight update. Here the weight transfer keeps the
tensors, and vLLM's loader is given them for requests with our path. All requests name one adapter, whose tensors change
with each version.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping

import torch
from vllm.config import lora as lora_config
from vllm.lora import lora_model, lora_weights, request, worker_manager

PATH = "libra_jax:memory"
"""Path of the adapter in requests. No directory has this name."""

REQUEST = request.LoRARequest("policy", 1, PATH)
"""Field of a request that makes the engine compute with the adapter."""

_A, _B = ENDS = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's tensors."""

RANKS: tuple[int, ...] = typing.get_args(lora_config.MaxLoRARanks)
"""Ranks of vLLM's buffers."""

_tensors: dict[str, torch.Tensor] = {}
"""The adapter of this process's model, by PEFT's names without their prefix; B includes the scale."""


def keep(tensors: Mapping[str, torch.Tensor], scale: float) -> None:
    """Replaces the adapter of this process's model by copies of A and B of every adapted projection."""
    _tensors.clear()
    for name, tensor in tensors.items():
        _tensors[name] = tensor * scale if name.endswith(_B) else tensor.clone()


def install() -> None:
    """Lets vLLM's loader take adapters of our path from memory. Idempotent."""
    manager = worker_manager.WorkerLoRAManager
    original = manager._load_adapter
    if original.__module__ == __name__:
        return

    def load(self: worker_manager.WorkerLoRAManager, lora_request: request.LoRARequest) -> lora_model.LoRAModel:
        if lora_request.lora_path != PATH:
            return original(self, lora_request)
        dtype, loras = self.lora_config.lora_dtype, {}
        for name, tensor in _tensors.items():
            if not name.endswith(_A):
                continue
            module, rank = name.removesuffix(_A), tensor.shape[0]
            # vLLM's packing of query, key and value keeps these tensors, so it gets copies.
            a, b = (_tensors[module + part].to(dtype, copy=True) for part in (_A, _B))
            loras[module] = lora_weights.LoRALayerWeights(module, rank, rank, a, b)
        if not loras:
            raise ValueError("a request came before the first weight sync has brought the adapter")
        return lora_model.LoRAModel(lora_request.lora_int_id, max(lora.rank for lora in loras.values()), loras)

    manager._load_adapter = load
