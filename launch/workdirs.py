"""A run's workdir: made for one config, refused to another, held by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from libra_jax import config as libra_config
from libra_jax import protocols
from libra_jax.coordinator import checkpoints
from libra_jax.telemetry import metrics


def default(config: libra_config.RunConfig) -> Path:
    """The workdir of a run that is given none."""
    return Path(f"runs/{config.name}-{libra_config.digest(config)}")


def open_workdir(config: libra_config.RunConfig, workdir: str | None) -> Path:
    """Makes the workdir and writes `config.json`; refuses one that belongs to another config.

    How many steps a run takes may change from one start to the next, but not to fewer than it has taken; so may the
    cluster's address, because a cluster that is started again is somewhere else.

    Raises:
      ConfigError: the workdir's config differs; the fields are named.
    """
    path = Path(workdir) if workdir else default(config)
    try:
        return _open(path, config)
    except OSError as error:
        raise protocols.ConfigError(
            f"--workdir={path} cannot be used ({error.strerror or error}); choose a folder that can be written"
        ) from error


def _open(path: Path, config: libra_config.RunConfig) -> Path:
    existed = path.exists()
    if existed:  # locked before it is read; a refused config leaves no new folder behind
        _lock(path)
    resolved = json.loads(json.dumps(libra_config.to_dict(config), default=list))
    stored_file = path / "config.json"
    if stored_file.exists():
        stored = _stored(stored_file)
        _check_same_run(path, stored, resolved)
        if stored == resolved:
            return path
    if not existed:
        path.mkdir(parents=True, exist_ok=True)
        _lock(path)
    partial = stored_file.with_suffix(".partial")
    partial.write_text(json.dumps(resolved, indent=2))
    partial.rename(stored_file)
    return path


def _stored(file: Path) -> dict[str, Any]:
    try:
        stored = json.loads(file.read_text())
        if isinstance(stored, dict) and {"task", "rollout"} <= stored.keys():  # any run's; not a model's config.json
            return stored
        problem = f"it holds {stored!r:.40}"
    except ValueError as error:
        problem = str(error)
    raise protocols.ConfigError(
        f"--workdir={file.parent}: its {file.name} is not the settings of a run ({problem}); put back the file as the "
        "run wrote it, or use another workdir"
    )


def _check_same_run(path: Path, stored: dict[str, Any], resolved: dict[str, Any]) -> None:
    steps, taken = resolved["steps"], checkpoints.newest_step(path)
    here = {**stored.get("cluster", {}), "address": resolved["cluster"]["address"]}
    differing = _differences({**stored, "steps": steps, "cluster": here}, resolved)
    if differing:
        raise protocols.ConfigError(
            f"--workdir={path} belongs to another config: {'; '.join(differing)}. "
            "Use another workdir, or the old settings"
        )
    if not resolved["checkpoint"]["every"] and taken < 1:
        recorded = max(metrics.read(path / metrics.METRICS_FILE), default=0)
        if recorded > 0:
            raise protocols.ConfigError(
                f"--workdir={path} holds {recorded} steps of a run that saves nothing (config.checkpoint.every is 0): "
                "it cannot go on, and a new one would take its place; use another --workdir, or move that one away"
            )
    if steps < taken:
        raise protocols.ConfigError(
            f"config.steps: {steps} is fewer than the {taken} steps that the run in {path} has taken; give more to "
            "go on, or use another --workdir"
        )


def _lock(workdir: Path) -> None:
    """Holds the workdir for as long as this process lives: two runs in it would cut each other's records back."""
    descriptor = os.open(workdir / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise protocols.ConfigError(
            f"--workdir={workdir} is in use by a run that has not ended; wait for it, or use another workdir"
        ) from None


def _differences(stored: Any, resolved: Any, name: str = "config") -> list[str]:
    if not (isinstance(stored, dict) and isinstance(resolved, dict)):
        return [] if stored == resolved else [f"{name} is {stored!r} there and {resolved!r} here"]
    keys = dict.fromkeys([*stored, *resolved])
    return [sentence for key in keys for sentence in _differences(stored.get(key), resolved.get(key), f"{name}.{key}")]
