"""launch/show.py as a person gives it: rollouts of a step, the best and worst, those of a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import sample_records
import scripts


def saved(workdir: Path) -> Path:
    records = [sample_records.record(step, rank) for step in (1, 2, 3) for rank in (1, 2, 3, 4)]
    (workdir / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return workdir


def show(workdir: Path, *flags: str) -> str:
    done = scripts.run_forked("show.py", str(workdir), *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_show_prints_the_last_step_and_what_flags_choose(tmp_path):
    saved(tmp_path)
    told = show(tmp_path, "--limit=2")
    assert [line.split(" · ")[1] for line in told.splitlines() if line.startswith("step 3 ·")] == [
        "reward 0.75 (length -0.25)",
        "reward 0.5 (length -0.25)",
    ]
    assert "2 more; --limit=4 shows them." in told
    assert not set(told) & set("\x1b\x07\x9b\u202e")
    assert r"\x1b[2J\x1b]0;owned\x07<script>" in told
    first = show(tmp_path, "--step=1")
    assert {line.split(" · ")[0] for line in first.splitlines() if " · reward " in line} == {"step 1"}
    worst = show(tmp_path, "--worst", "--prompt=task-1", "--limit=1")
    assert worst.splitlines()[0].startswith("step 1 · reward 0 ")


def test_show_says_in_a_sentence_what_it_does_not_find(tmp_path):
    scripts.assert_one_sentence(
        scripts.run_forked("show.py", str(tmp_path)), "no rollouts were saved", "telemetry.samples"
    )


def test_show_without_a_workdir_says_the_usage():
    result = scripts.run_forked("show.py")
    scripts.assert_one_sentence(result, "error: no WORKDIR is given; usage: python launch/show.py WORKDIR [FLAG ...]")
    assert result.returncode == 2
