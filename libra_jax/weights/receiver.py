"""Receives weights in a JAX process: from the chunks of an open snapshot to parameters on a mesh.

This is the inverse of `snapshot`, and does what an engine does: maps the trainer's shared memory, verifies the
checksums, and loads. The parameters are copies, because the trainer overwrites the shared memory with its next version.

Thread-safety: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models.adapters import lora
from libra_jax.models.hf import hf_names
from libra_jax.weights import memfd, snapshot


class Receiver:
    """Receives versions one after the other.

    Args:
      places: a `jax.ShapeDtypeStruct` with a sharding for each parameter, nested like the parameters.
    """

    def __init__(self, model_config: models_config.TransformerConfig, places: Mapping[str, Any]) -> None:
        self._places = places
        base = snapshot.wire_entries(model_config)
        self._sources = {source.hf_name: source for source in (*base, *hf_names.adapter_map(model_config))}
        # Tensors that travel although another parameter holds them (`lm_head.weight` of tied embeddings).
        self._copies = {source.hf_name for source in base} - {
            source.hf_name for source in hf_names.weight_map(model_config)
        }
        self._of_base = {source.hf_name for source in base}
        # The frozen weights under an adapter stay on the devices from version to version; their digest, and they.
        self._frozen = ""
        self._held: dict[str, Any] | None = None
        self._arriving = ""
        self._peers = memfd.PeerMemory()
        self._version: int | None = None
        self._count = 0
        self._checksums: dict[int, str] = {}
        self._tensors: dict[str, np.ndarray] = {}

    def start(self, version: int | None) -> None:
        """Drops a version that was partly received, and starts this one; None starts none. Keeps frozen weights."""
        self._version, self._count = version, 0
        self._checksums.clear()
        self._tensors.clear()
        self._arriving = ""

    def load(self, chunk: protocols.WeightChunk) -> None:
        """Takes a chunk's tensors, which must stay in place until `finish`. Each chunk comes once."""
        named = f"chunk {chunk.index} of version {chunk.policy_version}"
        if chunk.policy_version != self._version or chunk.index in self._checksums:
            raise protocols.LibraError(f"{named} does not belong to the update of version {self._version}.")
        # The version's digest, which every gradient sum carries, is made of the checksums.
        if chunk.checksum is None:
            raise protocols.LibraError(
                f"{named} has no checksum, so no one can tell whose it is: set rollout.checksum."
            )
        self._count = chunk.count
        if chunk.frozen:
            self._arriving = chunk.frozen
            if self._holds_frozen():
                self._checksums[chunk.index] = chunk.checksum
                return
        memory = self._peers.map(chunk.transport)
        checksum = memfd.digest(memoryview(memory)[: chunk.nbytes])
        if checksum != chunk.checksum:
            raise protocols.LibraError(
                f"{named} arrived damaged: checksum {checksum} instead of {chunk.checksum}; sync it again."
            )
        for entry in chunk.entries:
            source = self._sources.get(entry.name)
            if source is None or source.shape != tuple(entry.shape) or entry.name in self._tensors:
                raise protocols.LibraError(
                    f"{named} holds {entry.name} of shape {tuple(entry.shape)}, which this model has not, has in "
                    "another shape, or has received already; trainer and hybrid worker do not belong together."
                )
            kind = jax.numpy.dtype(entry.dtype)
            # A view: the bytes are copied once, in `finish`, straight to their device.
            flat = np.frombuffer(memory, kind, count=entry.nbytes // kind.itemsize, offset=entry.offset)
            self._tensors[entry.name] = flat.reshape(source.shape)
        self._checksums[chunk.index] = chunk.checksum

    def finish(self, version: int) -> tuple[Any, str]:
        """Returns the parameters on their devices, and the version's digest (`snapshot.HostSnapshot.digest`)."""
        if version != self._version:
            raise protocols.LibraError(
                f"version {version} cannot be finished: the update of {self._version} was begun."
            )
        has_frozen = self._holds_frozen()
        missing = sorted(self._sources.keys() - self._tensors.keys() - (self._of_base if has_frozen else set()))
        if missing or sorted(self._checksums) != list(range(self._count)):
            raise protocols.LibraError(
                f"version {version} is not whole: {len(self._checksums)} of {self._count} chunks came, without "
                f"{', '.join(missing[:3]) or 'nothing'}; sync it again."
            )
        if not has_frozen:
            self._frozen, self._held = "", None
        params: dict[str, Any] = {}
        leaves: dict[tuple[str, ...], list[np.ndarray]] = {}
        for name, source in self._sources.items():  # layers in their order
            # Another parameter holds a copied tensor: the copy is for engines, whose model is untied.
            if name not in self._copies and name in self._tensors:
                leaves.setdefault(source.path, []).append(self._tensors[name])
        for path, tensors in leaves.items():
            place: Any = self._places
            node = params
            for key in path[:-1]:
                place, node = place[key], node.setdefault(key, {})
            node[path[-1]] = _placed(tensors, place[path[-1]])
        if has_frozen:
            params = dict(lora.join(self._held or {}, params))
        elif self._arriving:
            self._frozen, self._held = self._arriving, lora.split(params)[1]
        digest = snapshot.snapshot_digest([self._checksums[index] for index in range(self._count)])
        # Wait for the copies: the trainer may overwrite the memory as soon as this method returns.
        jax.block_until_ready(params)
        self.start(None)
        return params, digest

    def _holds_frozen(self) -> bool:
        """Returns whether the frozen weights of the present version are on the devices already."""
        return bool(self._arriving) and self._arriving == self._frozen

    def close(self) -> None:
        """Releases the trainer's memory, and frozen weights. Idempotent."""
        self.start(None)
        self._frozen, self._held = "", None
        self._peers.close()


def _placed(tensors: list[np.ndarray], place: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a parameter on its devices. Each device's piece is copied out of the shared memory, and cast, once."""
    stacked = len(place.shape) > tensors[0].ndim

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        # Always a copy: JAX may keep the array that it is given, and the shared memory will change.
        if not stacked:
            return np.array(tensors[0][index], place.dtype)
        return np.stack([tensor[index[1:]] for tensor in tensors[index[0]]]).astype(place.dtype, copy=False)

    return jax.make_array_from_callback(place.shape, place.sharding, piece)
