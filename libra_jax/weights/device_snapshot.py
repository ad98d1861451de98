"""Weights that go from the trainer's devices to the engines, without host memory: the ipc and nccl transports.

nccl holds no snapshot. A thread of each trainer process gathers the live parameters (`models.hf.gather`), one by one,
while the engines receive. So the parameters must not change between `open` and `close`, which the trainer's lock
ensures, and every process calls both. ipc holds a copy in the wire dtype in torch's memory, because CUDA exports only
memory that torch allocated.

Run on one H200: the stream of tensors, and CUDA IPC to a second process, without vLLM (docs/results/gpu.md). NOT RUN on
CUDA: vLLM's side of ipc, and nccl. A test runs nccl's path with gloo in NCCL's place
(`tests/weights/test_nccl_transport.py`).
"""

from __future__ import annotations

import importlib
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import torch

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models.hf import gather, hf_names
from libra_jax.weights import snapshot

SENDER = "libra_jax.engines.vllm_weight_sender"
"""Module of the sender. It is named and not imported: weights do not depend on an engine."""


class DeviceSnapshot:
    """Sends one version at a time. One chunk holds the whole model.

    Args:
      dtype: wire dtype of matrices; vectors are float32.
      transport: "ipc" or "nccl".
      sync_seconds: maximum seconds to wait for the instances to receive.
      host: address of this host, at which the instances meet it.
    """

    def __init__(
        self, model_config: models_config.TransformerConfig, dtype: str, transport: str, sync_seconds: float, host: str
    ) -> None:
        self._sources = snapshot.wire_entries(model_config)
        self._dtype = dtype
        device = jax.local_devices()[0]
        place = torch.device("cpu") if device.platform == "cpu" else torch.device("cuda", device.local_hardware_id)
        self._stream = TensorStream(self._sources, dtype, place)
        sender = importlib.import_module(SENDER)
        # vLLM packs tensors into two buffers of this size, and loads what a buffer holds at once: about a layer.
        buffer_bytes = self._stream.layer_bytes
        self._sender = sender.Sender(transport, place, jax.process_index(), sync_seconds, host, buffer_bytes)
        self._version: int | None = None
        self._chunk: protocols.WeightChunk | None = None

    def open(
        self, version: int, params: Mapping[str, Any], destinations: Sequence[protocols.WeightDestination] = ()
    ) -> int:
        """Starts to send `params` to the destinations. See `snapshot.HostSnapshot.open`."""
        self._stream.leaves = {source.path: snapshot.leaf(params, source) for source in self._sources}
        entries, offset = [], 0
        # The chunk lies in no memory: its entries tell receivers names and shapes, and offsets add up its bytes.
        for source in self._sources:
            dtype = snapshot.wire_dtype(source, self._dtype)
            nbytes = math.prod(source.shape) * getattr(torch, dtype).itemsize
            entries.append(protocols.WeightEntry(source.hf_name, dtype, source.shape, offset, nbytes))
            offset += nbytes
        address = self._sender.begin(self._stream, destinations)
        self._version = version
        self._chunk = protocols.WeightChunk(version, 0, 1, tuple(entries), offset, address)
        return 1

    def stage(self, version: int, index: int) -> protocols.WeightChunk:
        """Returns the only chunk."""
        if version != self._version or index != 0 or self._chunk is None:
            raise protocols.LibraError(f"chunk {index} of version {version} cannot be staged: {self._version} is open")
        return self._chunk

    def close(self, version: int) -> None:
        """Waits until the last byte is sent, and frees the snapshot."""
        if version == self._version:
            self._version, self._chunk = None, None
            self._sender.end()
            self._stream.leaves = {}

    def shutdown(self) -> None:
        """Closes the transport. Idempotent."""
        self._version, self._chunk = None, None
        self._sender.shutdown()
        self._stream.leaves = {}


class TensorStream:
    """The parameters as named tensors on the first process's first device, in checkpoint order, one at a time.

    Attributes:
      leaves: the parameters by path; set before each pass.
    """

    def __init__(self, sources: Sequence[hf_names.HfEntry], dtype: str, device: torch.device) -> None:
        self.leaves: Mapping[tuple[str, ...], jax.Array] = {}
        self._sources = sources
        self._dtypes = [snapshot.wire_dtype(source, dtype) for source in sources]
        self._device = device
        self._block_bytes = snapshot.block_bytes(sources, dtype)
        self.layer_bytes = sum(
            math.prod(source.shape) * getattr(torch, kind).itemsize
            for source, kind in zip(sources, self._dtypes, strict=True)
            if source.layer == 0
        )

    def metadata(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Returns name, wire dtype and shape of every tensor."""
        return [
            (name, getattr(torch, dtype), torch.Size(shape))
            for source, dtype in zip(self._sources, self._dtypes, strict=True)
            for name, shape in source.tensors().items()
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor), each whole and in the wire dtype.

        With several processes, a pass is a collective: each process iterates to the end, or closes the iterator. Only
        the first process gets tensors.
        """
        requests = [
            gather.LeafRequest(self.leaves[source.path], dtype, source.layer)
            for source, dtype in zip(self._sources, self._dtypes, strict=True)
        ]
        with gather.blocks(requests, self._block_bytes, to_host=False) as blocks:
            if jax.process_index() != 0:
                return
            for number, group in itertools.groupby(blocks, key=operator.itemgetter(0)):
                source = self._sources[number]
                tensor = torch.empty(source.shape, dtype=getattr(torch, self._dtypes[number]), device=self._device)
                place = {snapshot.WHOLE if source.layer is None else source.layer: tensor}
                for _, pieces in group:
                    for target, part in snapshot.copies(pieces, place):
                        target.copy_(part)
                    if tensor.is_cuda:
                        # JAX reuses the block's memory as soon as no one refers to it.
                        torch.cuda.current_stream(self._device).synchronize()
                yield from hf_names.split(source.hf_name, tensor)
                del tensor, place
