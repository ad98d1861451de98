"""Reads and writes Hugging Face model directories: config.json, and weights in one or several safetensors files.

Reading streams one parameter at a time: each device's piece is read from the files, converted and placed. The host
therefore never holds the whole model beside the devices. Writing goes to a temporary directory, which is renamed into
place when it is complete.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.models.hf import gather, hf_names, weight_files
from libra_jax.protocols import DataError
from libra_jax.utils import checksums

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 4096

METADATA = {"format": "pt", "seal": checksums.SEAL}
"""Metadata of the weights of a sealed directory. It shows that a seal has been lost."""

UNSEALED = f"%s: its seal {checksums.SEAL} is missing, so damage to it would not be seen."
"""Warning about such a directory."""


def load(
    directory: str | pathlib.Path,
    config: model_config.TransformerConfig,
    dtype: str | transformer.Params = "float32",
    shardings: Any = None,
) -> transformer.Params:
    """Reads the weights of a Hugging Face directory.

    Args:
      directory: directory with `model.safetensors`, or else the shards that `model.safetensors.index.json` lists.
      config: shape of the model (`config.read_directory`).
      dtype: dtype of every leaf, or a tree of the parameters' nesting whose leaves have the wanted dtypes. The files
        may hold another dtype.
      shardings: a Sharding for each leaf, in the parameters' nesting; None places all on the default device.

    Raises:
      DataError: a file is missing or truncated; or a tensor is missing, misshapen or unknown to the model; or the
        output projection of a tied model differs from the embedding. Rotary frequencies are ignored.
    """
    # Together the processes read each file once.
    share = slice(jax.process_index(), None, jax.process_count())
    sealed = checksums.check_sealed(pathlib.Path(directory), weights=True, share=share)
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(pathlib.Path(directory), stack)
        if not sealed and any(checksums.SEAL in (handle.metadata() or {}).values() for _, handle in tensors.values()):
            logging.getLogger(__name__).warning(UNSEALED, directory)
        _check_tensors(config, tensors, directory)
        params: dict[str, Any] = {}
        for path, entries in _by_leaf(config).items():
            place = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if shardings is None else _get(shardings, path)
            *parents, name = path
            module = functools.reduce(lambda tree, key: tree.setdefault(key, {}), parents, params)
            kind = dtype if isinstance(dtype, str) else str(_get(dtype, path).dtype)
            module[name] = _read_leaf(entries, tensors, kind, place)
    return params


def save(
    params: transformer.Params,
    config: model_config.TransformerConfig,
    directory: str | pathlib.Path,
    max_shard_bytes: int = 4 << 30,
    *,
    sealed: bool = False,
) -> None:
    """Writes config.json, the weights and, if there are several files, their index.

    If several processes share the parameters, all of them call this function, and process 0 writes.

    Args:
      params: parameters; every leaf has the same dtype.
      directory: directory to create, with its parents; a model in it is replaced.
      max_shard_bytes: maximum bytes of a file (a single larger tensor gets its own file).
      sealed: the caller seals the directory afterwards. The files say so, and `load` warns if the seal is missing.

    Raises:
      DataError: `directory` holds something that is not a model, or the disk refuses.
    """
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    if len(dtypes) != 1:
        raise ValueError(f"parameters of one dtype expected, not {sorted(dtypes)}")
    (dtype,) = dtypes
    entries = hf_names.weight_map(config)
    leaves = {path: _get(params, path) for path in _by_leaf(config)}
    # Arrays of numpy have no devices to be gathered from.
    arrays = {path: x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for path, x in leaves.items()}
    requests = [gather.LeafRequest(arrays[entry.path], dtype, entry.layer) for entry in entries]
    block_bytes = max(math.prod(entry.shape) for entry in entries if entry.layer is not None) * np.dtype(dtype).itemsize
    # Every process enters, because taking the next block is a collective.
    with gather.blocks(requests, block_bytes, to_host=True) as blocks:
        if jax.process_index() == 0:
            metadata = METADATA if sealed else {"format": "pt"}
            target = pathlib.Path(directory).absolute()
            _save(_tensors(entries, blocks, dtype), dtype, config, target, max_shard_bytes, metadata)


def _save(
    tensors: Iterator[tuple[str, np.ndarray]],
    dtype: str,
    config: model_config.TransformerConfig,
    target: pathlib.Path,
    max_shard_bytes: int,
    metadata: Mapping[str, str],
) -> None:
    if target.exists() and not (target / "config.json").is_file() and any(target.iterdir()):
        raise DataError(f"{target}: exists and holds no model, so it is not replaced; choose another directory.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            # mkdtemp makes a folder for this user only.
            partial.chmod(0o755)
            _write(tensors, dtype, config, partial, max_shard_bytes, metadata)
            if target.exists():
                old = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
                target.rename(old)  # a directory may be renamed onto an empty directory
                partial.rename(target)
                shutil.rmtree(old)
            else:
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{target}: the model could not be written ({error}).") from error


# --------------------------------------------------------------------------------------------------------------------
# Reading.
# --------------------------------------------------------------------------------------------------------------------

_Tensors = Mapping[str, tuple[pathlib.Path, Any]]
"""Hugging Face name -> its file, and a handle whose `get_slice(name)` reads pieces."""


def _open_tensors(directory: pathlib.Path, stack: contextlib.ExitStack) -> _Tensors:
    tensors: dict[str, tuple[pathlib.Path, Any]] = {}
    for file in weight_files.files(directory):
        try:
            handle = stack.enter_context(safetensors.safe_open(str(file), framework="numpy"))
        except (safetensors.SafetensorError, OSError) as error:
            raise DataError(f"{file}: is not a whole safetensors file ({error}); download it again.") from None
        tensors |= dict.fromkeys(handle.keys(), (file, handle))
    return tensors


def _check_tensors(config: model_config.TransformerConfig, tensors: _Tensors, directory: str | pathlib.Path) -> None:
    """Checks that files and model have the same tensors, by name and shape."""
    shapes = {name: (file, tuple(handle.get_slice(name).get_shape())) for name, (file, handle) in tensors.items()}
    weight_files.check(config, shapes, directory)
    if not config.tie_word_embeddings or _HEAD not in tensors:
        return
    # transformers would use the head that the file holds, not the tied table.
    (file, head), (_, embedding) = tensors[_HEAD], tensors[_EMBEDDING]
    head_slice, embedding_slice = head.get_slice(_HEAD), embedding.get_slice(_EMBEDDING)
    rows = embedding_slice.get_shape()[0]
    same = head_slice.get_shape() == embedding_slice.get_shape()
    for start in range(0, rows, _COMPARED_ROWS):  # in parts, because whole tables may be gigabytes
        part = slice(start, min(start + _COMPARED_ROWS, rows))
        same = same and np.array_equal(head_slice[part], embedding_slice[part])
    if not same:
        raise DataError(
            f"{file}: {_HEAD} differs from {_EMBEDDING}, although config.json says tie_word_embeddings; set that to "
            f"false to train both, or remove {_HEAD}."
        )


def _read_leaf(
    entries: Sequence[hf_names.HfEntry], tensors: _Tensors, dtype: str, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Reads one parameter onto its devices, each piece on demand; devices with the same piece share one read."""
    stacked = entries[0].layer is not None
    shape = (len(entries), *entries[0].shape) if stacked else entries[0].shape
    pieces: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}

    def read(entry: hf_names.HfEntry, index: tuple[slice, ...]) -> np.ndarray:
        if entry.of_experts:
            return np.stack([read_tensor(name, index[1:]) for name in list(entry.tensors())[index[0]]])
        return read_tensor(entry.hf_name, index)

    def read_tensor(name: str, index: tuple[slice, ...]) -> np.ndarray:
        file, handle = tensors[name]
        try:
            return np.asarray(handle.get_slice(name)[index]).astype(dtype)
        except (safetensors.SafetensorError, OSError) as error:
            raise DataError(f"{file}: tensor {name} cannot be read ({error}).") from None

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
        if key not in pieces:
            first, *rest = (slice(start, stop) for start, stop, _ in key)
            if stacked:
                pieces[key] = np.stack([read(entry, tuple(rest)) for entry in entries[first]])
            else:
                pieces[key] = read(entries[0], (first, *rest))
        return pieces[key]

    return jax.make_array_from_callback(shape, sharding, piece)


# --------------------------------------------------------------------------------------------------------------------
# Writing.
# --------------------------------------------------------------------------------------------------------------------


def save_file(tensors: dict[str, np.ndarray], file: pathlib.Path, metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file. Equal tensors and metadata give equal bytes."""
    safetensors.numpy.save_file(tensors, file, metadata=dict(metadata))
    # safetensors writes metadata in the order of a hash map, which differs from call to call.
    ordered = json.dumps(dict(sorted(metadata.items())), separators=(",", ":")).encode()
    with file.open("r+b") as handle:
        header = handle.read(int.from_bytes(handle.read(8), "little"))
        start = 8 + header.index(b'"__metadata__":') + len(b'"__metadata__":')
        handle.seek(start)
        handle.write(ordered)


def _write(
    tensors: Iterator[tuple[str, np.ndarray]],
    dtype: str,
    config: model_config.TransformerConfig,
    directory: pathlib.Path,
    max_shard_bytes: int,
    metadata: Mapping[str, str],
) -> None:
    values = model_config.to_hf(config, dtype)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    files: list[list[str]] = []
    total = 0
    # The number of files is known only at the end, so files get their final names then.
    for number, shard in enumerate(_in_shards(tensors, max_shard_bytes), start=1):
        # Hugging Face's readers refuse files that do not name the framework of their tensor layout.
        save_file(shard, directory / f"{number}.safetensors", metadata)
        # On the disk before the rename: after a power cut, the directory is the old model or the whole new one.
        with (directory / f"{number}.safetensors").open("rb") as file:
            os.fsync(file.fileno())
        files.append(list(shard))
        total += sum(array.nbytes for array in shard.values())
    if len(files) == 1:
        (directory / "1.safetensors").rename(directory / weight_files.SINGLE)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (directory / f"{number}.safetensors").rename(directory / name)
        places |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (directory / weight_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _tensors(
    entries: Sequence[hf_names.HfEntry], blocks: Iterator[gather.Block], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor of the checkpoint, put together from its blocks."""
    for number, block in itertools.groupby(blocks, key=lambda item: item[0]):
        entry = entries[number]
        tensor = np.empty(entry.shape, dtype)
        for start, part in gather.parts(block):
            if entry.layer is not None:
                start, part = start[1:], part[entry.layer - start[0]]
            tensor[tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=True))] = part
            del part  # see `gather.parts`
        yield from hf_names.split(entry.hf_name, tensor)


def _in_shards(tensors: Iterator[tuple[str, np.ndarray]], max_shard_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields groups of tensors of at most `max_shard_bytes`."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _by_leaf(config: model_config.TransformerConfig) -> Mapping[tuple[str, ...], Sequence[hf_names.HfEntry]]:
    leaves: dict[tuple[str, ...], list[hf_names.HfEntry]] = {}
    for entry in hf_names.weight_map(config):
        leaves.setdefault(entry.path, []).append(entry)
    return leaves


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
