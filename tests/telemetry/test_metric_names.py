"""The registry of metric names: all that is emitted is in it, and a strict recorder refuses everything else."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_jax import config as config_lib
from libra_jax.telemetry import memory, metrics, recorder

ROOT = Path(__file__).parents[2]
ROOMS = (
    "algorithms",
    "coordinator",
    "environments",
    "examples",
    "harness",
    "hybrid",
    "planning",
    "rewards",
    "rollouts",
    "simulator",
    "tools",
    "trainer_control",
    "training",
)
NAME = re.compile(r"[a-z_]+(/[a-z_]+)+")


@pytest.mark.parametrize(
    ("name", "registered"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/brevity", "reward/<function>"),
        ("reward/brevity/words", "reward/<function>/<number>"),
        ("tool/mcp/files.read+look/calls", "tool/<tool>/calls"),
        ("agent/f1", "agent/<number>"),
        ("groups/replaced_redundant", "groups/replaced_<reason>"),
        ("warm_start/target_probability", "warm_start/<metric>"),
        ("evaluation/agent/tool_calls", "evaluation/<metric>"),
        ("evaluation/reward/brevity", "evaluation/<metric>"),
        ("evaluation/nothing", None),
        ("tool/look", None),
        ("lossy", None),
        ("loss/", None),
        ("", None),
    ],
)
def test_a_name_is_found_by_itself_or_by_its_pattern(name, registered):
    found = metrics.find(name)
    assert (found and found.name) == registered


def test_every_metric_is_registered_once_with_a_meaning():
    names = [metric.name for metric in metrics.METRICS]
    assert len(names) == len(set(names))
    assert all(metric.meaning and metric.source for metric in metrics.METRICS)


def test_recorders_of_tests_refuse_a_name_that_is_not_registered(tmp_path):
    files = recorder.create(
        config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(console=False, tensorboard=False)),
        tmp_path,
        lambda: 0.0,
    )
    for one in (files, memory.MemoryRecorder()):
        with pytest.raises(ValueError, match=r"'invented/number' is no metric of libra_jax\.telemetry\.metrics"):
            one.metrics(1, {"loss": 1.0, "invented/number": 2.0})
    files.close()


def test_a_recorder_of_users_records_every_name(tmp_path, monkeypatch):
    monkeypatch.delenv(metrics.STRICT_VARIABLE)
    one = recorder.create(
        config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(console=False)), tmp_path, lambda: 0.0
    )
    one.metrics(1, {"invented/number": 2.0})
    one.close()
    assert "invented/number" in (tmp_path / "metrics.jsonl").read_text()


def test_the_metrics_of_the_golden_step_are_registered():
    metrics.check(json.loads((ROOT / "tests" / "training" / "golden_step.json").read_text()))


def written(tree: ast.AST) -> Iterator[str]:
    """Names that a module writes as keys of a dict, with "x" for what a format inserts."""
    for node in ast.walk(tree):
        keys = node.keys if isinstance(node, ast.Dict) else []
        if isinstance(node, ast.Assign):
            keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        for key in keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value
            elif isinstance(key, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "x" for part in key.values)


def test_names_that_the_source_writes_are_registered():
    """Runs of the tests emit most names; this looks at those of rare cases, too."""
    modules = [file for room in ROOMS for file in (ROOT / "libra_jax" / room).rglob("*.py")]
    names = {name for file in modules for name in written(ast.parse(file.read_text())) if NAME.fullmatch(name)}
    assert len(names) > 40
    # The runs fill them in.
    templates = {"reward/x/x", "warm_start/x", "evaluation/x", "evaluation/pass_at_x", "routing/x_seconds"}
    assert [name for name in sorted(names - templates) if metrics.find(name) is None] == []
