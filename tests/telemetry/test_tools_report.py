"""The report on tools: outcomes, seconds, turns and ends as the trace has them, and no such section without tools."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from libra_jax.scheduling.prediction import prediction_quality
from libra_jax.telemetry.report import page, report, tool_report


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
    tally = tool_report.Tally()
    for one in records:
        tally.add(one)
    return tally


def text_of(sections):
    """The words of the page, without its marks."""
    html = page.render("t", "h", [], sections)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_calls_are_counted_by_tool_step_and_status():
    tally = tallied(invented())
    python, both = tally.tools["python"], tally.tools["python+search"]
    assert (python.outcomes.total(), python.of_status("success"), python.of_status("failure")) == (48, 32, 16)
    assert (python.outcomes[1, "failure"], python.outcomes[5, "failure"]) == (4, 0)
    assert both.outcomes == {(8, "timeout"): 1}
    assert sorted(tally.turns.items())[:2] == [((1, 3), 4), ((2, 3), 4)]
    assert tally.ends[1, "max_turns"] == 1


def test_the_section_tells_outcomes_seconds_payload_turns_and_ends():
    tally = tallied(invented())
    shown = tool_report.sections(tally)
    assert [section.title for section in shown] == [
        "Tools",
        "Tool outcomes by step",
        "Seconds of a call",
        "Turns of a rollout",
        "How rollouts ended",
    ]
    text = text_of(shown)
    assert "python 48 32 16 0 30.0 ms 500.0 ms 500.0 ms 20 200" in text
    assert "python+search 1 0 0 1 10.00 s 10.00 s 10.00 s 7 7" in text
    assert "how steps 1 to 2 steps 7 to 8 answered 75.0% 100.0% max_turns 25.0% 0.0%" in text
    assert sum("<svg" in section.picture for section in shown) == 3
    assert tool_report.sentence(tally) == (
        "A rollout took 3.0 turns in the first quarter of the steps and **2.1** in the last."
    )


def test_a_run_without_tools_says_how_attempts_ended_alone():
    tally = tallied([record(1, 0, [turn()]), record(2, 0, [turn(), turn()])])
    assert [section.title for section in tool_report.sections(tally)] == ["How rollouts ended"]
    assert tool_report.sections(tool_report.Tally()) == []
    assert tool_report.sentence(tally) == ""


def test_a_run_of_one_step_has_one_histogram_and_no_change_to_tell():
    tally = tallied([record(1, 0, [turn(tool="python", status="success"), turn()])])
    shown = tool_report.sections(tally)
    assert len(shown) == 5
    assert "steps 1" in shown[3].picture
    assert tool_report.sentence(tally) == ""


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
    tally = tallied([garbled, *invented()])
    assert tally.tools["python"].of_status("failure") == 16
    assert all(second >= 0 for second in tally.tools["python"].seconds)


def test_only_the_most_called_tools_are_pictured_and_the_others_are_in_the_table():
    records = [
        record(1, index, [*[turn(tool=f"tool{index}", status="success")] * (index + 1), turn()]) for index in range(12)
    ]
    shown = tool_report.sections(tallied(records))
    assert "4 more are in the table" in shown[1].note
    assert "tool0" in [row[0] for row in shown[0].table.rows]
    assert "tool0<" not in shown[1].picture


def test_many_turns_share_the_last_bar():
    picture = tool_report.draw_turns({"steps 1": {2: 0.5, 60: 0.25, 90: 0.25}})
    assert "24: or more" in picture


def test_the_report_of_a_workdir_has_tools_and_what_they_predict(tmp_path):
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in invented()))
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", report.write_report(tmp_path).read_text()))
    assert "with 49 tool calls (16 failed and 1 timed out)" in text
    assert "Tool outcomes by step" in text
    assert "Causal states alone account for" in text


def test_what_returns_predict_is_told_in_sentences_and_rows():
    found = prediction_quality.measure([each for one in invented() for each in prediction_quality.rollouts(one)])
    rows = tool_report.states(found)
    assert rows[0][:4] == ("python", "under 64", "success", "32")
    assert ("python", "128 to 255", "failure", "16", "40.0", "40") in rows
    first, second, *_ = tool_report.verdicts(found)
    assert first.startswith("Causal states alone account for")
    assert "naming the fullest bucket each time is right for" in second
    assert [section.title for section in tool_report.causes(found)] == [tool_report.CAUSES_TITLE, "Causal states"]
    assert tool_report.causes(None) == []


def test_a_share_just_below_zero_has_no_sign():
    found = prediction_quality.measure([each for one in invented() for each in prediction_quality.rollouts(one)])
    below = dataclasses.replace(found, explained=-0.001)
    assert "account for none of the variance" in tool_report.verdicts(below)[0]
