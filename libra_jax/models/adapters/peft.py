"""Reads and writes adapters as PEFT does: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import functools
import json
import logging
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from libra_jax.models import config as model_config
from libra_jax.models import sharding
from libra_jax.models.adapters import adapters
from libra_jax.models.hf import hf, hf_names
from libra_jax.protocols import DataError
from libra_jax.utils import checksums


def save(adapter: Any, config: model_config.TransformerConfig, directory: pathlib.Path, base: str) -> None:
    """Writes an adapter in float32.

    If several processes share the adapter, all of them call this function, and process 0 writes.

    Args:
      adapter: leaves of the adapter.
      config: shape of the model, with its adapter.
      directory: directory to create, or to write the two files into.
      base: name or directory of the model under the adapter.

    Raises:
      DataError: the disk refuses.
    """
    leaves, structure = jax.tree.flatten(adapter)
    with sharding.whole(leaves) as gathered:
        if jax.process_index() != 0:
            return
        # An adapter is small, so the host holds it whole.
        host_tree = jax.tree.unflatten(structure, [np.asarray(leaf, np.float32) for leaf in gathered])
    tensors = {}
    for entry in hf_names.adapter_map(config):
        stacked = functools.reduce(lambda tree, key: tree[key], entry.path, host_tree)
        tensors[f"{adapters.PREFIX}{entry.hf_name}"] = np.ascontiguousarray(stacked[entry.layer])
    try:
        directory.mkdir(parents=True, exist_ok=True)
        hf.save_file(tensors, directory / adapters.WEIGHTS_FILE, hf.METADATA)
        text = json.dumps(adapters.to_peft(config, base), indent=2)
        (directory / adapters.CONFIG_FILE).write_text(text + "\n")
    except OSError as error:
        raise DataError(f"{directory}: the adapter could not be written ({error}).") from error


def load(directory: str | pathlib.Path, config: model_config.TransformerConfig, places: Any) -> Any:
    """Reads an adapter.

    Args:
      directory: directory of a PEFT adapter.
      config: shape of the model, with the adapter that the directory must hold.
      places: `jax.ShapeDtypeStruct` leaves of the adapter, with the shardings to read into.

    Raises:
      DataError: a file cannot be read, or holds another adapter; the message names the difference.
    """
    folder = pathlib.Path(directory)
    sealed = checksums.check_sealed(folder, weights=True)
    adapters.check_directory(config, folder)
    file = folder / adapters.WEIGHTS_FILE
    try:
        with safetensors.safe_open(str(file), framework="numpy") as handle:
            if not sealed and checksums.SEAL in (handle.metadata() or {}).values():
                logging.getLogger(__name__).warning(hf.UNSEALED, folder)
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  # no mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"config.model.lora.path: {file}: cannot be read ({error}).") from None
    stacks: dict[tuple[str, ...], list[np.ndarray]] = {}
    for entry in hf_names.adapter_map(config):
        stacks.setdefault(entry.path, []).append(tensors[f"{adapters.PREFIX}{entry.hf_name}"])

    def make_array(path: tuple[Any, ...], place: jax.ShapeDtypeStruct) -> jax.Array:
        array = np.stack(stacks[tuple(key.key for key in path)]).astype(place.dtype)
        return jax.make_array_from_callback(place.shape, place.sharding, array.__getitem__)

    return jax.tree_util.tree_map_with_path(make_array, places)
