"""A snapshot of an adapter, and of the frozen weights under it, which are written into shared memory once.

The chunks of the adapter come first. The chunks of the frozen weights follow in every version, because an engine that
starts later needs them. They carry the weights' digest (`WeightChunk.frozen`), by which a receiver knows the weights
that it holds already. Such a receiver reads the adapter's chunks only.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models.adapters import lora
from libra_jax.models.hf import hf_names
from libra_jax.weights import snapshot


class AdapterSnapshot:
    """Holds one snapshot at a time in host memory. Not thread-safe. See `snapshot.HostSnapshot` for the arguments.

    Attributes:
      nbytes: bytes of an adapter, which every version brings.
      frozen_nbytes: bytes of the frozen weights.
    """

    def __init__(
        self, model_config: models_config.TransformerConfig, dtype: str, chunk_bytes: int, checksum: bool
    ) -> None:
        entries = hf_names.adapter_map(model_config)
        self._adapter = snapshot.HostSnapshot(model_config, dtype, chunk_bytes, checksum, entries)
        # With checksums in any case: the digest is made of them.
        self._base = snapshot.HostSnapshot(model_config, dtype, chunk_bytes, True)
        self._checksum = checksum
        self.nbytes, self.frozen_nbytes = self._adapter.nbytes, self._base.nbytes
        self._version: int | None = None
        self._adapter_chunks = 0
        self._frozen: list[protocols.WeightChunk] = []
        self._digest = ""
        # A leaf of the weights in memory. Weak, so that a resize can free the arrays of its old mesh.
        self._written: weakref.ref[jax.Array] | None = None

    def open(
        self, version: int, params: Mapping[str, Any], destinations: Sequence[protocols.WeightDestination] = ()
    ) -> int:
        """Takes a snapshot of the policy, frozen weights and adapter. See `snapshot.HostSnapshot.open`.

        Frozen weights that are the same arrays as last time are not written again.
        """
        self._version = None
        _, base = lora.split(params)
        first = jax.tree.leaves(base)[0]
        if self._written is None or self._written() is not first:
            self._written = None
            count = self._base.open(version, base)
            if jax.process_index() == 0:
                self._digest = self._base.digest(version)
                self._frozen = [self._base.stage(version, index) for index in range(count)]
            self._written = weakref.ref(first)
        self._adapter_chunks = self._adapter.open(version, params)
        self._version = version
        return self._adapter_chunks + len(self._frozen)

    def stage(self, version: int, index: int) -> protocols.WeightChunk:
        """Returns one chunk of the open snapshot. It stays readable until the next snapshot is opened."""
        count = self._adapter_chunks + len(self._frozen)
        if version != self._version or not 0 <= index < count:
            raise protocols.LibraError(
                f"chunk {index} of version {version} cannot be staged: version {self._version} is open, with {count} "
                "chunks"
            )
        if index < self._adapter_chunks:
            return dataclasses.replace(self._adapter.stage(version, index), count=count)
        chunk = self._frozen[index - self._adapter_chunks]
        checksum = chunk.checksum if self._checksum else None
        return dataclasses.replace(
            chunk, policy_version=version, index=index, count=count, checksum=checksum, frozen=self._digest
        )

    def digest(self, version: int) -> str:
        """Returns the digest of the last opened version. Works also after `close`."""
        self._adapter.digest(version)  # refuses another version
        return snapshot.snapshot_digest([*self._adapter.checksums(), *self._base.checksums()])

    def close(self, version: int) -> None:
        """Ends the snapshot. Its memory is reused for the next one."""
        if version == self._version:
            self._version = None
            self._adapter.close(version)

    def shutdown(self) -> None:
        """Releases the shared memory. Idempotent."""
        self._version = self._written = None
        self._frozen = []
        self._adapter.shutdown()
        self._base.shutdown()
