"""Compares a workdir's config with the config of a run that goes on there, and records the changes.

Settings fall into three classes. Settings that only affect reports or waits may change freely
(`config_lib.MAY_CHANGE`). Settings that change the learning or the devices need --allow_changes. Settings that the
checkpoint cannot follow are always refused. Every start with changes adds one line to `config_history.jsonl`, and the
report shows it.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_type_hints

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.protocols import ConfigError, LibraError
from libra_jax.telemetry import files
from libra_jax.utils import checksums

NEVER = ("model.preset",)
"""Settings that no run can change, because its weights would have another shape."""

NEVER_AFTER_CHECKPOINT = ("optimizer.name",)
"""Settings that no checkpoint can follow, because the optimizer's state would have another structure."""

_TENSORS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
    "tie_word_embeddings",
    "num_experts",
    "expert_intermediate_size",
)
"""Fields of a model's shape that determine its weights and their sizes."""

Settings = Mapping[str, Any]
"""The content of a `config.json`, nested by group. An earlier version of this program may have written it."""

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Change:
    """One setting that differs.

    Attributes:
      name: full name without `config.`, such as `optimizer.learning_rate`.
      before: value in the workdir's `config.json`; None if it has no such setting.
      after: value of the run that goes on; None if it has no such setting.
    """

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"config.{self.name} is {self.before!r} there and {self.after!r} here"


def allowed_names(text: str) -> tuple[str, ...]:
    """Parses --allow_changes, a comma-separated list of settings; `config.` before a name may be left out.

    Raises:
      ConfigError: a setting does not exist; the message offers the nearest name.
    """
    names = tuple(part.strip().removeprefix("config.") for part in text.split(",") if part.strip())
    kinds = dict(_settings(config_lib.RunConfig))
    mappings = [setting for setting, kind in kinds.items() if "Mapping" in str(kind)]
    for name in names:
        if name not in kinds and not any(_covers(mapping, name) for mapping in mappings):
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = config_lib.now(name) or (f"did you mean {near[0]}?" if near else "")
            raise ConfigError(f"--allow_changes: there is no setting {name!r}" + (f"; {hint}" if hint else ""))
    return names


def find(stored: Any, resolved: Any, name: str = "") -> list[Change]:
    """Compares two resolved configs of nested plain values. Lists settings in the order of the stored config."""
    if isinstance(stored, Mapping) and isinstance(resolved, Mapping):
        keys = dict.fromkeys([*stored, *resolved])
        return [
            change
            for key in keys
            for change in find(stored.get(key, _MISSING), resolved.get(key, _MISSING), f"{name}.{key}".lstrip("."))
        ]
    if stored == resolved:
        return []
    return [Change(name, *(None if value is _MISSING else value for value in (stored, resolved)))]


def check(workdir: Path, changes: Sequence[Change], allowed: Sequence[str], *, checkpoint: bool = False) -> None:
    """Refuses changes that were not allowed.

    Args:
      workdir: folder of the run, for the message.
      changes: differences between the workdir's config and the new one.
      allowed: names of --allow_changes. The name of a group allows all of its settings.
      checkpoint: True if the run has a checkpoint, which must be able to follow.

    Raises:
      ConfigError: a change is not allowed, or no checkpoint can follow it; the message names the flag that allows it.
    """
    if fixed := [change for change in changes if any(_covers(name, change.name) for name in NEVER)]:
        raise ConfigError(
            f"--workdir={workdir} belongs to another model: {'; '.join(map(str, fixed))}. Its checkpoints hold weights "
            "of that model; use another workdir, or the old settings"
        )
    if checkpoint and (structural := [change for change in changes if change.name in NEVER_AFTER_CHECKPOINT]):
        raise ConfigError(
            f"--workdir={workdir} has a checkpoint that cannot follow: {'; '.join(map(str, structural))}. Its "
            "optimizer's state has another structure; use another workdir, or the old settings"
        )
    free = (*config_lib.MAY_CHANGE, *allowed)
    refused = [change for change in changes if not any(_covers(name, change.name) for name in free)]
    if refused:
        names = ",".join(dict.fromkeys(change.name for change in refused))
        raise ConfigError(
            f"--workdir={workdir} belongs to another config: {'; '.join(map(str, refused))}. Use another workdir, or "
            f"the old settings, or change the run from its last checkpoint on by --allow_changes={names}"
        )


def check_model(workdir: Path, stored: Settings, resolved: Settings) -> None:
    """Refuses another model with weights of other sizes, if both directories can be read here.

    Args:
      workdir: folder of the run, which has a checkpoint.
      stored: group `model` of its config.
      resolved: group `model` of the run that goes on.

    Raises:
      ConfigError: the checkpoint's weights do not match.
    """
    try:
        before, after = (
            dataclasses.asdict(model_config.read_directory(str(model.get("path", "")))) for model in (stored, resolved)
        )
    except LibraError:  # one of them is not on this machine: restoring the checkpoint will tell
        return
    differing = [name for name in _TENSORS if before[name] != after[name]]
    if differing:
        differences = ", ".join(f"{name} {before[name]} there and {after[name]} here" for name in differing)
        raise ConfigError(
            f"config.model.path: {resolved['path']} is of another shape than the model of the checkpoint in {workdir} "
            f"({differences}); use another workdir, or the old model"
        )


def record(workdir: Path, changes: Sequence[Change], allowed: Sequence[str], step: int) -> None:
    """Appends the changes to the workdir's `config_history.jsonl`, one line for all changes of one start.

    Args:
      workdir: folder of the run.
      changes: accepted changes.
      allowed: names of --allow_changes.
      step: training step of the checkpoint from which the run goes on.
    """
    entry = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "changes": {change.name: [change.before, change.after] for change in changes},
        "allowed": [change.name for change in changes if any(_covers(name, change.name) for name in allowed)],
    }
    path = workdir / files.CONFIG_HISTORY_FILE
    text = checksums.read_bytes(path) if path.exists() else b"\n"
    review = files.Review(path, checksums.known_records(workdir))
    for line in text.splitlines():
        review.problem(line)
    with path.open("ab") as file:
        # A line that lost its newline must not swallow this one. An emptied file's empty line is named as damaged.
        file.write(b"\n" * (not text.endswith(b"\n")) + files.json_line({**entry, **review.place()}))


def _covers(name: str, setting: str) -> bool:
    # The name of a group covers all of its settings.
    return setting == name or setting.startswith(f"{name}.")


def _settings(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the full name and type of each setting and group of settings."""
    for name, field in get_type_hints(kind).items():
        yield prefix + name, field
        if dataclasses.is_dataclass(field):
            yield from _settings(cast("type[Any]", field), f"{prefix}{name}.")
