"""The report on tools: outcomes, seconds, turns and ends as the trace has them, and no such section without tools."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from libra_jax.scheduling.prediction import prediction_quality
from libra_jax.telemetry.report import page, pictures, recorded_run, report, tool_report


def turn(generated=10, tool=None, status=None, payload=0, seconds=0.0):
    return {
        "generated_tokens": generated,
        "tool": tool,
        "status": status,
        "payload_tokens": payload,
        "tool_seconds": seconds,
    }


def record(step, sample, turns, finish="answered"):
    return {
        "trajectory_id": f"p{step}/{sample}",
        "prompt_id": f"p{step}",
        "prompt_tokens": 5,
        "turns": turns,
        "step": step,
        "finish": finish,
    }


def invented():
    """Eight steps: at first three turns, one a failure, later two that succeed; once a search together with python."""
    for step in range(1, 9):
        for sample in range(4):
            early = step <= 4
            calls = [turn(tool="python", status="success", payload=20, seconds=0.01 * (sample + 1))]
            if early:
                calls.append(turn(tool="python", status="failure", payload=200, seconds=0.5))
            if step == 8 and sample == 0:
                calls.append(turn(tool="python+search", status="timeout", payload=7, seconds=10.0))
            ends = "max_turns" if early and sample == 3 else "answered"
            yield record(step, sample, [*calls, turn(40 if early else 5)], ends)


def tallied(records):
    run = recorded_run.RecordedRun()
    for one in records:
        run.add_trajectory(one)
    valid = [one for one in records if "trajectory_id" in one]
    run.prediction_quality = prediction_quality.measure(
        [each for one in valid for each in prediction_quality.rollouts(one)]
    )
    return run


CONTENTS = {
    "Tools": tool_report.calls,
    "Tool outcomes by step": tool_report.outcomes,
    "Seconds of a call": tool_report.seconds,
    "Turns of a rollout": tool_report.turns,
    "How rollouts ended": tool_report.ends,
    "What tool returns predict": tool_report.predictions,
    "Causal states": tool_report.causal_states,
}


def shown(run):
    """The parts of each section on tools that the run has, by its title."""
    return {title: parts for title, contents in CONTENTS.items() if (parts := page.parts(contents, run))}


def test_calls_are_counted_by_tool_step_and_status():
    run = tallied([*invented()])
    python, both = run.tools["python"], run.tools["python+search"]
    assert (python.outcomes.total(), python.of_status("success"), python.of_status("failure")) == (48, 32, 16)
    assert (python.outcomes[1, "failure"], python.outcomes[5, "failure"]) == (4, 0)
    assert both.outcomes == {(8, "timeout"): 1}
    assert sorted(run.turns.items())[:2] == [((1, 3), 4), ((2, 3), 4)]
    assert run.finishes[1, "max_turns"] == 1


def test_the_sections_tell_outcomes_seconds_payload_turns_and_ends():
    run = tallied([*invented()])
    parts = shown(run)
    assert list(parts) == list(CONTENTS)
    assert [" ".join(row) for row in parts["Tools"][0].rows] == [
        "python 48 32 16 0 30.0 ms 500.0 ms 500.0 ms 20 200",
        "python+search 1 0 0 1 10.00 s 10.00 s 10.00 s 7 7",
    ]
    ends = parts["How rollouts ended"][0]
    assert [" ".join(row) for row in (ends.heads, *ends.rows)] == [
        "how steps 1 to 2 steps 7 to 8",
        "answered 75.0% 100.0%",
        "max_turns 25.0% 0.0%",
    ]
    assert tool_report.sentence(run) == (
        "A rollout took 3.0 turns in the first quarter of the steps and **2.1** in the last."
    )


def test_a_run_without_tools_says_how_attempts_ended_alone():
    run = tallied([record(1, 0, [turn()]), record(2, 0, [turn(), turn()])])
    run.prediction_quality = None
    assert list(shown(run)) == ["How rollouts ended"]
    assert shown(recorded_run.RecordedRun()) == {}
    assert tool_report.sentence(run) == ""


def test_a_run_of_one_step_has_one_histogram_and_no_change_to_tell():
    run = tallied([record(1, 0, [turn(tool="python", status="success"), turn()])])
    [picture] = shown(run)["Turns of a rollout"]
    axes = picture.figure(pictures.NARROW).axes[0]
    assert axes.get_legend_handles_labels()[1] == ["steps 1"]
    assert tool_report.sentence(run) == ""


@pytest.mark.parametrize(
    "garbled",
    [
        {},
        {"turns": None, "step": "x", "finish": 3},
        {"turns": [3, {}, {"tool": 3, "status": "success"}, {"tool": "python", "status": "odd"}]},
        {"turns": [{"tool": "python", "status": "success", "tool_seconds": "slow", "payload_tokens": None}]},
        {"turns": [{"tool": "python", "status": "success", "tool_seconds": float("nan")}]},
    ],
)
def test_a_garbled_record_spoils_nothing(garbled):
    run = tallied([garbled, *invented()])
    assert run.tools["python"].of_status("failure") == 16
    assert all(second >= 0 for second in run.tools["python"].seconds)


def test_only_the_most_called_tools_are_pictured_and_the_others_are_in_the_table():
    records = [
        record(1, index, [*[turn(tool=f"tool{index}", status="success")] * (index + 1), turn()]) for index in range(12)
    ]
    parts = shown(tallied(records))
    picture, note = parts["Tool outcomes by step"]
    assert "4 more are in the table" in note
    assert "tool0" in [row[0] for row in parts["Tools"][0].rows]
    assert "tool0<" not in picture.svg(pictures.BROAD)


def test_many_turns_share_the_last_bar():
    run = tallied([record(1, 0, [turn(tool="python", status="success")] * count) for count in (2, 2, 60, 90)])
    [picture] = tool_report.turns(run)
    assert "24: or more" in picture.svg(pictures.NARROW)


def test_the_report_of_a_workdir_has_tools_and_what_they_predict(tmp_path):
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in invented()))
    source = report.write_report(tmp_path).read_text()
    assert "with 49 tool calls (16 failed and 1 timed out)" in source
    assert [title for title in CONTENTS if not re.search(f"<(h2|summary)>{title}<", source)] == []
    assert "Causal states alone account for" in source


def test_what_returns_predict_is_told_in_sentences_and_rows():
    quality = tallied([*invented()]).prediction_quality
    rows = tool_report.states(quality)
    assert rows[0][:4] == ("python", "under 64", "success", "32")
    assert ("python", "128 to 255", "failure", "16", "40.0", "40") in rows
    first, second, *_ = tool_report.verdicts(quality)
    assert first.startswith("Causal states alone account for")
    assert "naming the fullest bucket each time is right for" in second
    # A share just below zero has no sign.
    below = dataclasses.replace(quality, explained=-0.001)
    assert "account for none of the variance" in tool_report.verdicts(below)[0]
