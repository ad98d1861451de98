"""The two ends of a weight update in vLLM: the check in the engine's front end, and the loader in each worker process.

Written against vLLM 0.32 (vllm/distributed/weight_transfer/base.py). Chunks are checked in the front end against the
checkpoint's tensors, by name and shape, before a worker loads anything. vLLM itself names neither the tensor nor the
problem, keeps old weights for missing tensors, and stays half-loaded after an error.

The loader reads weights in checkpoint format from shared memory. Each layer is reloaded as a whole, because on CPU its
kernels have repacked the weights that they loaded first. Nothing imported here reaches JAX.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm import platforms
from vllm.distributed.weight_transfer import base, nccl_engine
from vllm.model_executor.model_loader import reload

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import vllm_lora
from libra_jax.models import config as models_config
from libra_jax.models.adapters import adapters
from libra_jax.models.hf import hf_names
from libra_jax.weights import memfd


class Checker:
    """Follows the weight verbs of one engine, and raises LibraError for a faulty update.

    Args:
      name: name of the engine, for errors.
      model_config: content of the config.json from which the engine was started.
      lora: adapter that weight syncs bring beside the weights; rank 0 for none.

    Attributes:
      vocab_size: tokens of the model.
      scale: factor of the adapter's product; None without an adapter.
      version: version of the update under way.
      frozen: digest of the frozen weights that the engine holds under the adapter (`WeightChunk.frozen`); else empty.
    """

    def __init__(self, name: str, model_config: Mapping[str, Any], lora: config_lib.LoraConfig | None = None) -> None:
        shape = models_config.untied(models_config.from_hf(model_config))
        shape = adapters.adapted(shape, lora or config_lib.LoraConfig())
        self.vocab_size = shape.vocab_size
        self.scale = shape.adapter.scale if shape.adapter else None
        self._name = name
        entries = (*hf_names.weight_map(shape), *hf_names.adapter_map(shape))
        self._expected = {entry.hf_name: entry.shape for entry in entries}
        self.version: int | None = None
        self.frozen = self._arriving = ""
        self._count = 0
        self._indices: set[int] = set()
        self._names: set[str] = set()

    def start(self, version: int) -> None:
        """Starts an update, regardless of the last one's outcome."""
        self.version, self._count = version, 0
        self._indices, self._names, self._arriving = set(), set(), ""

    def add(self, chunk: protocols.WeightChunk) -> bool:
        """Checks a chunk before it is loaded. Returns False if the engine holds its tensors already."""
        if chunk.policy_version != self.version:
            self._refuse(f"a chunk of version {chunk.policy_version} came while version {self.version} is loaded")
        for entry in chunk.entries:
            expected = self._expected.get(entry.name)
            if expected is None:
                self._refuse(f"weight {entry.name} is not part of the engine's model")
            if tuple(entry.shape) != expected:
                self._refuse(f"weight {entry.name} has shape {tuple(entry.shape)}, not the model's {expected}")
        self._count = chunk.count
        self._indices.add(chunk.index)
        self._names.update(entry.name for entry in chunk.entries)
        if not chunk.frozen:
            return True
        self._arriving = chunk.frozen
        if chunk.frozen == self.frozen:
            return False
        # From here to the end of the update, the engine holds neither the old weights nor the new ones.
        self.frozen = ""
        return True

    def finish(self, version: int) -> None:
        """Checks that the update is complete, before it takes effect. `confirm` follows once the workers serve it."""
        if version != self.version:
            self._refuse(f"version {version} was to be served while version {self.version} is loaded")
        if len(self._indices) != self._count or not self._count:
            self._refuse(f"{len(self._indices)} of {self._count} weight chunks of version {version} came")
        if missing := sorted(set(self._expected) - self._names):
            self._refuse(f"version {version} lacks {missing[0]} ({len(missing)} tensors in all)")
        # Until the workers confirm, no one knows which weights they hold.
        self.version, self.frozen = None, ""

    def confirm(self) -> None:
        """Notes that the workers hold the finished update."""
        self.frozen = self._arriving

    def _refuse(self, problem: str) -> None:
        raise protocols.LibraError(f"engine {self._name} cannot take these weights: {problem}")


def payload(chunk: protocols.WeightChunk, name: str, scale: float | None = None) -> dict[str, Any]:
    """Returns the chunk as plain values (`MemfdUpdateInfo`), for the workers of instance `name`."""
    # vLLM's own CUDA engines define the payload of their transports; the sender has written it into the address.
    if chunk.transport["kind"] != "memfd":
        return dict(chunk.transport["instances"][name]["update_info"])
    return {
        "policy_version": chunk.policy_version,
        "index": chunk.index,
        "count": chunk.count,
        "entries": [
            (entry.name, entry.dtype, list(entry.shape), entry.offset, entry.nbytes) for entry in chunk.entries
        ],
        "nbytes": chunk.nbytes,
        "transport": dict(chunk.transport),
        "checksum": chunk.checksum,
        "scale": scale,
    }


@dataclass
class MemfdInitInfo(base.WeightTransferInitInfo):
    """Empty: each chunk carries the address of its bytes."""


@dataclass
class MemfdUpdateInfo(base.WeightTransferUpdateInfo):
    """A `protocols.WeightChunk` as plain values. Entries are (name, dtype, shape, offset, nbytes).

    `scale` is the factor of an adapter's product.
    """

    policy_version: int
    index: int
    count: int
    entries: list[tuple[str, str, list[int], int, int]]
    nbytes: int
    transport: dict[str, Any]
    checksum: str | None = None
    scale: float | None = None


class NcclWeightTransferEngine(nccl_engine.NCCLWeightTransferEngine):
    """vLLM's engine, which leaves its former group before it joins another one."""

    def init_transfer_engine(self, init_info: nccl_engine.NCCLWeightTransferInitInfo) -> None:
        """Joins the group of the next sync. vLLM alone would keep the former group's memory on the GPU."""
        self.shutdown()
        super().init_transfer_engine(init_info)


class MemfdWeightTransferEngine(base.WeightTransferEngine[MemfdInitInfo, MemfdUpdateInfo]):
    """Loads chunks of a snapshot into this worker's shard of the model."""

    init_info_cls = MemfdInitInfo
    update_info_cls = MemfdUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._peers = memfd.PeerMemory()
        self._reloading = False
        self._adapter: dict[str, torch.Tensor] = {}
        self._scale = 1.0
        if self.vllm_config.lora_config is not None:
            vllm_lora.install()

    def init_transfer_engine(self, init_info: MemfdInitInfo) -> None:
        """Does nothing: the first chunk carries its address."""

    def start_weight_update(self) -> None:
        """Forgets an update that was given up. The first chunk of weights prepares the layers, not an adapter's."""
        self._reloading = False
        self._adapter.clear()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one chunk. Overrides the base method, which synchronises an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: MemfdUpdateInfo) -> None:
        """Loads one chunk's tensors, after a check of their bytes."""
        memory = self._peers.map(update_info.transport)
        if update_info.checksum is not None:
            digest = memfd.digest(memoryview(memory)[: update_info.nbytes])
            if digest != update_info.checksum:
                raise ValueError(
                    f"chunk {update_info.index} of version {update_info.policy_version} arrived damaged: checksum "
                    f"{digest} instead of {update_info.checksum}"
                )
        tensors: list[tuple[str, torch.Tensor]] = []
        with warnings.catch_warnings():
            # The mapping is read-only on purpose, and nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            for name, dtype, shape, offset, nbytes in update_info.entries:
                kind = getattr(torch, dtype)
                flat = torch.frombuffer(memory, dtype=kind, count=nbytes // kind.itemsize, offset=offset)
                tensors.extend(hf_names.split(name, flat.view(shape)))
        if any(name.endswith(vllm_lora.ENDS) for name, _ in tensors):
            # Views: the trainer keeps every chunk of the snapshot in place until the update finishes.
            self._adapter |= dict(tensors)
            self._scale = update_info.scale or self._scale
            return
        if not self._reloading:
            reload.initialize_layerwise_reload(self.model)
            self._reloading = True
        # An incomplete layer keeps views of its tensors, until the update finishes at the latest.
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Switches to the new weights. `Checker` has checked that they are complete."""
        if self._adapter:
            vllm_lora.keep(self._adapter, self._scale)
            self._adapter.clear()
        if not self._reloading:
            return
        self._reloading = False
        reload.finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and platforms.current_platform.is_cpu():
                # vLLM packs a layer's experts for the CPU's kernel at their first load only
                # (UnquantizedFusedMoEMethod._setup_kernel), and the reload has unpacked them.
                kernel.fused_experts.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Releases the trainer's memory."""
        self._peers.close()
