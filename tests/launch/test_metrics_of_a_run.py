"""What a real run, embedded and on the double of an engine, writes to its metrics is registered, each of it."""

from __future__ import annotations

import dataclasses

import damage
import pytest

from libra_jax import config as config_lib
from libra_jax.telemetry import metrics


@pytest.mark.slow
def test_every_name_of_an_embedded_run_is_registered(tmp_path, monkeypatch):
    monkeypatch.delenv(metrics.STRICT_VARIABLE, raising=False)  # all of its names are wanted, not the first one
    settings = dataclasses.replace(
        damage.settings(),
        evaluation=config_lib.EvaluationConfig(every=1, tasks=2),
    )
    damage.run(settings, tmp_path / "run")
    steps = metrics.read(tmp_path / "run" / metrics.METRICS_FILE)
    names = set().union(*steps.values())
    assert sorted(steps) == [0, 1, 2, 3]
    assert {"loss", "evaluation/accuracy", "reward/varying", "agent/turns"} <= names
    assert [name for name in sorted(names) if metrics.find(name) is None] == []
