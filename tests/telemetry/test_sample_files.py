"""Samples in the files and viewers of a run, in its report, and as launch/show.py prints them."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import sample_records

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.telemetry import recorder, samples
from libra_jax.telemetry.report import report


def make(workdir: Path, clock: Any = None, guard: Any = lambda: True, **telemetry: Any) -> recorder.RunRecorder:
    config = config_lib.RunConfig(name="demo", telemetry=config_lib.TelemetryConfig(console=False, **telemetry))
    return recorder.create(config, workdir, clock or (lambda: 0.0), guard=guard)


def recorded(workdir: Path, steps: Any = range(1, 4), **settings: Any) -> Path:
    one = make(workdir, tensorboard=False, **settings)
    for step in steps:
        for rank in range(1, 5):
            one.sample(sample_records.record(step, rank))
        one.metrics(step, {"reward/mean": 0.5})
    one.close()
    return workdir


def test_samples_are_cut_back_to_the_checkpoint_of_a_resumed_run(tmp_path):
    recorded(tmp_path, range(1, 5))
    recorder.cut_back(tmp_path, 2)
    recorded(tmp_path, range(3, 5))
    assert [sample.step for sample in samples.read(tmp_path / "samples.jsonl")] == sorted([1, 2, 3, 4] * 4)


def test_a_run_that_was_taken_over_writes_no_samples(tmp_path):
    recorded(tmp_path, guard=lambda: False)
    assert not (tmp_path / "samples.jsonl").exists()


def test_the_file_reads_back_the_same_and_holds_no_raw_escape(tmp_path):
    recorded(tmp_path, [1])
    data = (tmp_path / "samples.jsonl").read_text()
    assert not set(data) & set("\x1b\x07\x9b\u202e")
    assert json.loads(data.splitlines()[0])["turns"][0]["text"] == f"I call {sample_records.NASTY}"


@pytest.mark.parametrize("garbled", [{}, {"turns": 7, "reward": "x", "prompt": None}, {"turns": [3, {"tool": 9}]}])
def test_a_garbled_record_is_shown_as_far_as_it_goes(garbled):
    assert samples.parse({"step": 1, **garbled}).text().startswith("step 1 ")


def test_wandb_gets_a_table_with_the_steps_numbers(tmp_path, monkeypatch):
    logged: list[dict[str, Any]] = []
    run = types.SimpleNamespace(id="abc", log=lambda values, step: logged.append(values), finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **_: run, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    recorded(tmp_path, range(1, 3), wandb_project="mine")
    columns, rows = logged[1]["samples"]
    assert [row[:3] for row in rows] == [[2, 1, 0.75], [2, 2, 0.5], [2, 3, 0.25], [2, 4, 0.0]]
    assert len(columns) == len(rows[0])
    assert r"no such thing \x1b[2J" in rows[0][-1]


def test_the_report_shows_best_and_worst_rollouts_as_harmless_text(tmp_path):
    text = report.write_report(recorded(tmp_path)).read_text()
    assert "best: step 3 · reward 0.75 (length -0.25) · rank 1 of 4 · finish answered" in text
    assert "worst: step 3 · reward 0 (length -0.25) · rank 4 of 4" in text
    assert "best: step 1 " in text
    assert "step 2 ·" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not set(text) & set("\x1b\x07\x9b\u202e")
    assert "<script" not in text


def test_a_negative_count_of_samples_is_refused_by_name():
    with pytest.raises(protocols.ConfigError, match=r"config\.telemetry\.samples: must not be negative, not -1"):
        config_lib.TelemetryConfig(samples=-1)


def test_viewers_and_report_get_a_very_long_text_cut_in_its_middle(tmp_path):
    long = "a" * samples.MOST_CHARACTERS + "b" * 500 + "c" * samples.MOST_CHARACTERS
    one = make(tmp_path, tensorboard=False)
    one.sample(sample_records.record(1, prompt=long))
    one.metrics(1, {"reward/mean": 0.5})
    one.close()
    [sample] = samples.read(tmp_path / "samples.jsonl")
    assert sample.pieces[0].text == long
    for text in (sample.text(), report.write_report(tmp_path).read_text()):
        assert f"[... {samples.MOST_CHARACTERS + 500:,} characters left out ...]" in text
        assert "b" * 500 not in text
