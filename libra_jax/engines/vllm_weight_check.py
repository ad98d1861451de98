"""Checks one weight update in the engine's front end: its expected chunks, its received chunks, and vLLM's payload.

Chunks are checked here against the checkpoint's tensors, by name and shape, before a worker loads anything. vLLM 0.32
itself names neither the tensor nor the problem, keeps old weights for missing tensors, and stays half-loaded after an
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models import hf_names


class Checker:
    """Follows the weight verbs of one engine, and raises LibraError for a faulty update.

    Args:
      name: name of the engine, for errors.
      model_config: content of the config.json from which the engine was started.
    """

    def __init__(self, name: str, model_config: Mapping[str, Any]) -> None:
        shape = models_config.untied(models_config.from_hf(model_config))
        self.vocab_size = shape.vocab_size
        self._name = name
        self._expected = {entry.hf_name: entry.shape for entry in hf_names.weight_map(shape)}
        self.version: int | None = None
        self._count = 0
        self._indices: set[int] = set()
        self._names: set[str] = set()

    def start(self, version: int) -> None:
        """Starts an update, regardless of the last one's outcome."""
        self.version, self._count = version, 0
        self._indices, self._names = set(), set()

    def add(self, chunk: protocols.WeightChunk) -> None:
        """Checks a chunk before it is loaded.

        Raises:
          LibraError: the chunk is of another version, or a tensor is not the model's by name or shape.
        """
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

    def finish(self, version: int) -> None:
        """Checks that the update is complete, before it takes effect.

        Raises:
          LibraError: a chunk or a tensor is missing.
        """
        if version != self.version:
            self._refuse(f"version {version} was to be served while version {self.version} is loaded")
        if len(self._indices) != self._count or not self._count:
            self._refuse(f"{len(self._indices)} of {self._count} weight chunks of version {version} came")
        if missing := sorted(set(self._expected) - self._names):
            self._refuse(f"version {version} lacks {missing[0]} ({len(missing)} tensors in all)")
        self.version = None

    def _refuse(self, problem: str) -> None:
        raise protocols.LibraError(f"engine {self._name} cannot take these weights: {problem}")


def payload(chunk: protocols.WeightChunk) -> dict[str, Any]:
    """Returns the chunk as plain values, for the worker's weight-transfer engine of the chunk's transport."""
    if chunk.transport["kind"] != "memfd":
        return dict(chunk.transport["update_info"])
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
    }
