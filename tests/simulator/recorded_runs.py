"""Simulated runs that leave the files of a real one: what they cost is known, so a twin of theirs can be judged."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import simulator_doubles as doubles

from libra_jax import config as config_lib
from libra_jax.models import rows
from libra_jax.planning.costs import measured_costs
from libra_jax.scheduling import costs as scheduling_costs
from libra_jax.scheduling import registry
from libra_jax.simulator import results, world
from libra_jax.telemetry import recorder as telemetry

ENGINES = {
    1: measured_costs.EngineCosts(4e-3, 50e-6, 0.1e-6, 20e-6, 10e-6, 300e-6),
    2: measured_costs.EngineCosts(3e-3, 30e-6, 0.05e-6, 12e-6, 6e-6, 200e-6),
}
TRAIN = measured_costs.TrainCosts(0.2, 40e-6)
UPDATE = measured_costs.UpdateCosts(0.03, 0.05)
MODEL = measured_costs.Calibration(ENGINES, train=TRAIN, update=UPDATE, rows=rows.RowShape((8192,), 1))


class FileRecorder(results.StepRecorder):
    """Keeps what `StepRecorder` keeps, and writes a run's files."""

    def __init__(self, config: config_lib.RunConfig, workdir: pathlib.Path) -> None:
        super().__init__()
        self._files = telemetry.create(config, workdir, lambda: 0.0)

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        super().metrics(step, scalars)
        self._files.metrics(step, scalars)

    def span(self, track: str, name: str, start: float, end: float, arguments: Mapping[str, Any] | None = None) -> None:
        self._files.span(track, name, start, end, arguments)

    def trajectory(self, record: Mapping[str, Any]) -> None:
        self._files.trajectory(record)

    def close(self) -> None:
        self._files.close()


def record(workdir: pathlib.Path, workload: Any = None, **changes: Any) -> config_lib.RunConfig:
    """Simulates a run among machines of known costs, and leaves its files."""
    changes = {
        "steps": 8,
        "trainer": {"rows_per_micro_batch": 1},
        "telemetry": {"console": False, "tensorboard": False},
        **changes,
    }
    config = doubles.run_config(**changes)
    recorder = FileRecorder(config, workdir)
    costs = scheduling_costs.LinearCosts(config.scheduler.costs)
    world.run(
        config,
        world.SimulationConfig(train_devices=config.trainer.devices),
        workload or doubles.SeededWorkload(),
        lambda *_: registry.create(config.scheduler, costs=costs, kinds=config.rollout.kinds),
        recorder=recorder,
        model=MODEL,
    )
    recorder.close()
    text = json.dumps(config_lib.to_dict(config), default=list)
    (workdir / "config.json").write_text(text)
    return config
