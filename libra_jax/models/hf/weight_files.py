"""Compares the safetensors files of a model directory with its config.json, by their headers. Standard library only.

A file begins with eight bytes, the length of a JSON header, which holds each tensor's shape and place.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

from libra_jax.models import config as model_config
from libra_jax.models.hf import hf_names
from libra_jax.protocols import DataError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_HEADER_BYTES = 100_000_000
"""Most bytes of a header that safetensors reads."""

Found = Mapping[str, tuple[pathlib.Path, tuple[int, ...]]]
"""Hugging Face name -> the tensor's file and shape."""


def check_directory(config: model_config.TransformerConfig, directory: str | pathlib.Path) -> None:
    """Checks that a directory holds the weights of a model: whole files, with every tensor's name and shape.

    Raises:
      DataError: a file is missing or cut off; or a tensor is missing, misshapen or unknown to the model.
    """
    tensors = {name: (file, shape) for file in files(directory) for name, shape in read_header(file).items()}
    check(config, tensors, directory)


def files(directory: str | pathlib.Path) -> list[pathlib.Path]:
    """Lists the files of the weights.

    Raises:
      DataError: the directory, a file or the index is missing, or the index cannot be read.
    """
    folder = pathlib.Path(directory)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such model directory; give the path of a downloaded Hugging Face model.")
    paths, index = [folder / SINGLE], folder / INDEX
    # The single file wins, as in transformers: an index beside it is a leftover of an older save.
    if not paths[0].is_file():
        if not index.is_file():
            raise DataError(f"{folder}: holds neither {SINGLE} nor {INDEX}; download the model's safetensors release.")
        try:
            names = json.loads(index.read_text())["weight_map"].values()
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index}: is not a whole index ({error!r}); download it again.") from None
        paths = [folder / name for name in sorted(set(names))]
    for file in paths:
        if not file.is_file():
            raise DataError(f"{file}: missing; download the model again.")
    return paths


def read_header(file: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a file by its name.

    Raises:
      DataError: the file has no readable header, or ends before its last tensor.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if (size := file.stat().st_size) != end:
            raise ValueError(f"{size:,} bytes, and its header speaks of {end:,}")
        return {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file}: is not a whole safetensors file ({error}); download it again.") from None


def check(config: model_config.TransformerConfig, tensors: Found, directory: str | pathlib.Path) -> None:
    """Checks that files and model have the same tensors, by name and shape. Rotary frequencies are ignored.

    Raises:
      DataError: a tensor is missing, misshapen or unknown.
    """
    for name, implied in _shapes(config).items():
        if name not in tensors:
            raise DataError(f"{directory}: no file holds the tensor {name}, which config.json implies.")
        file, shape = tensors[name]
        if shape != implied:
            raise DataError(f"{file}: tensor {name} has shape {shape}, but config.json implies {implied}.")
    # The untied names, because a tied model's file may still hold a copy of the head.
    shapes = _shapes(model_config.untied(config))
    for name, (file, _) in tensors.items():
        # Old checkpoints also store rotary frequencies, which follow from the config.
        if name not in shapes and not name.endswith("rotary_emb.inv_freq"):
            raise DataError(f"{file}: tensor {name} has no place in the model that config.json describes.")


def _shapes(config: model_config.TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of the checkpoint by its name."""
    return {name: shape for entry in hf_names.weight_map(config) for name, shape in entry.tensors().items()}
