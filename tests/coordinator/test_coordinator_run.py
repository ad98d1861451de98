"""Whole runs on doubles: synchronous and asynchronous, warm start, evaluation, metrics and trace."""

from __future__ import annotations

import coordinator_doubles as doubles
import pytest


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_every_prompt_is_trained_once_within_the_staleness_bound(tmp_path, staleness):
    bench = doubles.Bench(doubles.make_config(coordinator={"staleness": staleness}), tmp_path)
    summary = bench.run()
    assert summary.steps == 4
    assert summary.trained == 12
    assert sorted(bench.trained["prompts"]) == sorted(f"task-{index}" for index in range(12))
    assert max(bench.trained["staleness"]) <= staleness
