"""The adapters that a run's config requests on a model, and PEFT's description of them. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.models.hf import hf_names, weight_files
from libra_jax.protocols import ConfigError, DataError
from libra_jax.utils import checksums

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of a PEFT adapter."""

PREFIX = "base_model.model."
"""PEFT's prefix of the names in `hf_names.adapter_map`."""


_BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal")
"""Values of PEFT's `init_lora_weights` that leave the base weights as they are, beside true and false."""

_CHECKED_APART = (
    *("r", "lora_alpha", "target_modules", "layers_to_transform", "init_lora_weights"),
    # Names, and what is for training only.
    *("task_type", "base_model_name_or_path", "lora_dropout", "inference_mode"),
)
"""Fields of `to_peft` that may have other values, or are compared with the config."""

_HARMLESS = (
    *("auto_mapping", "peft_version", "revision", "eva_config", "megatron_core", "qalora_group_size"),
    "ensure_weight_tying",  # of modules_to_save, which is refused
)
"""Other fields of PEFT that change nothing in a trained adapter."""


def adapted(shape: model_config.TransformerConfig, lora: config_lib.LoraConfig) -> model_config.TransformerConfig:
    """Returns the shape with the adapters that the config requests; the shape itself if the rank is 0.

    Raises:
      ConfigError: a target is a projection of experts, the model has no such layer, or vLLM's LoRA runtime cannot serve
        the model.
    """
    if not lora.rank:
        return shape
    outside = [name for name in lora.targets if name not in hf_names.ATTENTION]
    if shape.num_experts and outside:
        raise ConfigError(
            f"config.model.lora.targets: {', '.join(outside)} are projections of experts, which have no adapters here; "
            f"set model.lora.targets={hf_names.ATTENTION}"
        )
    # With a LoRA runtime, vLLM 0.32 takes a Triton kernel for experts, with or without adapters on them
    # (fused_moe/oracle/unquantized.py). Its CPU build has no Triton: the first request kills the engine.
    if shape.num_experts and lora.sync == "adapter":
        raise ConfigError(
            "config.model.lora.sync: adapter needs vLLM's LoRA runtime, which serves no mixtures of experts on CPU and "
            "was not tried with them on GPU; set model.lora.sync=merge"
        )
    if lora.layers and lora.layers[-1] >= shape.num_layers:
        raise ConfigError(
            f"config.model.lora.layers: there is no layer {lora.layers[-1]}, because the model's {shape.num_layers} "
            f"layers end with number {shape.num_layers - 1}"
        )
    layers = lora.layers or tuple(range(shape.num_layers))
    # In one order, so that the order of the config's tuple names no other model.
    targets = tuple(name for name in config_lib.PROJECTIONS if name in lora.targets)
    adapter = model_config.AdapterConfig(lora.rank, lora.alpha, targets, layers)
    return dataclasses.replace(shape, adapter=adapter)


def parameter_count(config: model_config.TransformerConfig) -> int:
    """Counts the parameters of the adapter; 0 without one."""
    return sum(math.prod(entry.shape) for entry in hf_names.adapter_map(config))


def to_peft(config: model_config.TransformerConfig, base: str) -> dict[str, Any]:
    """Returns PEFT's adapter_config.json of the adapter. `base` names the model under it."""
    adapter = config.adapter
    assert adapter is not None
    every = adapter.layers == tuple(range(config.num_layers))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        # PEFT declares an integer, and computes with any number.
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "target_modules": list(adapter.targets),
        "layers_to_transform": None if every else list(adapter.layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


def check_directory(config: model_config.TransformerConfig, directory: pathlib.Path) -> None:
    """Checks that a PEFT directory, `model.lora.path`, holds the adapter of `config`: its description and its tensors.

    Raises:
      DataError: a file cannot be read, or holds another adapter; the message names the difference.
    """
    file = directory / WEIGHTS_FILE
    try:
        _check_description(config, directory / CONFIG_FILE)
        if not file.is_file():
            raise DataError(f"{file}: missing; give the directory of a PEFT adapter.")
        shapes = weight_files.read_header(file)
        for entry in hf_names.adapter_map(config):
            shape = shapes.pop(f"{PREFIX}{entry.hf_name}", None)
            if shape != entry.shape:
                raise DataError(f"{file}: {PREFIX}{entry.hf_name} has shape {shape}, not {entry.shape}.")
        if shapes:
            raise DataError(f"{file}: {min(shapes)} has no place in the adapter that config.model.lora describes.")
    except DataError as error:
        raise DataError(f"config.model.lora.path: {error}") from None


def _check_description(config: model_config.TransformerConfig, file: pathlib.Path) -> None:
    """Checks that a PEFT file describes the adapter of `config`."""
    description = to_peft(config, "")
    try:
        values = json.loads(checksums.read_bytes(file))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error}); give the directory of a PEFT adapter.") from None
    if not isinstance(values, Mapping):
        raise DataError(f"{file}: must hold a JSON object.")
    assert config.adapter is not None
    layers = values.get("layers_to_transform")
    # PEFT takes one layer's number for a list of it, and none for all.
    values = {**values, "layers_to_transform": [layers] if isinstance(layers, int) else layers or None}
    if values["layers_to_transform"] is not None:
        description["layers_to_transform"] = list(config.adapter.layers)
    settings = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "layers_to_transform": "layers"}
    for name, setting in settings.items():
        actual, expected = values.get(name), description[name]
        if isinstance(expected, list):
            actual, expected = (
                sorted(actual, key=str) if isinstance(actual, list) else actual,
                sorted(expected, key=str),
            )
        if actual != expected:
            raise DataError(f"{file}: {name} is {actual}, and config.model.lora.{setting} asks for {expected}.")
    init = values.get("init_lora_weights", True)
    if not isinstance(init, bool) and str(init).lower() not in _BASE_KEEPING_INITS:
        raise DataError(
            f"{file}: init_lora_weights = {init!r} may train an adapter over changed base weights, which is not "
            "supported; save it as a plain adapter (PEFT's path_initial_model_for_weight_conversion)."
        )
    # A field that is not named here may change what the tensors mean, so only its absence is right.
    for name, value in values.items():
        if name in description and name not in _CHECKED_APART and value != description[name]:
            raise DataError(f"{file}: {name} = {value!r} is not supported; supported is {description[name]!r}.")
        if name not in description and name not in _HARMLESS and value not in (None, False, {}, [], ""):
            raise DataError(f"{file}: {name} = {value!r:.80} is not supported; train a plain adapter without it.")
