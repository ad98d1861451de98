"""`launch/plan.py` as a user meets it: a table, a file, a picture, and one sentence for each kind of bad input."""

import functools
import json

import pytest
import scripts

plan = functools.partial(scripts.run, "plan.py")
LINE = {"trajectory_id": "0/0", "prompt_id": "0", "prompt_tokens": 200}


def test_a_plan_is_printed_written_and_drawn_and_uses_no_more_than_there_is(tmp_path):
    output = tmp_path / "plan.json"
    result = plan("--config=configs/simulate.py", "--accelerators=64", f"--output={output}")
    assert result.returncode == 0, result.stderr
    made = json.loads(output.read_text())
    assert list(made) == ["train", "rollout", "predicted", "solve_seconds", "calibrated"]
    assert list(made["train"]) == ["devices", "data", "fsdp", "tensor"]
    train, buckets = made["train"], made["rollout"]
    assert train["devices"] == train["data"] * train["fsdp"] * train["tensor"]
    assert train["devices"] + sum(item["count"] * item["tensor_parallel"] for item in buckets) <= 64
    assert [list(item) for item in buckets] == [["tensor_parallel", "count", "max_remaining_tokens"]] * len(buckets)
    predicted = made["predicted"]
    assert predicted["step_seconds"] == max(predicted["train_seconds"], predicted["rollout_seconds"])
    assert made["calibrated"] is False
    assert "not calibrated" in result.stdout
    assert "Runner-up:" in result.stdout
    assert output.with_suffix(".svg").read_text().startswith("<?xml")


def test_degrees_that_do_not_divide_the_model_are_left_out(tmp_path):
    """Qwen2.5-0.5B has 14 attention heads, which neither 4 nor 8 divides."""
    output = tmp_path / "plan.json"
    model = "--config.simulation.model=Qwen2.5-0.5B"
    result = plan("--config=configs/simulate.py:search", model, f"--output={output}")
    assert result.returncode == 0, result.stderr
    assert {item["tensor_parallel"] for item in json.loads(output.read_text())["rollout"]} <= {1, 2}


def test_a_sweep_says_what_each_case_comes_to_and_which_has_no_plan():
    result = plan("--config=configs/simulate.py", "--sweep=hardware", "--accelerators=64")
    assert result.returncode == 0, result.stderr
    for name in ("a100", "h200", "v5p"):
        assert name in result.stdout
    assert "v5e: the model trains on no mesh of 64 v5e devices" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--accelerators=1"], ["--accelerators: 1 cannot both train and roll out"]),
        (["--accelerators=4"], ["the model trains on no mesh of 4 a800 devices", "GB"]),
        (["--config.simulation.hardware=a900"], ["'a900' is not one of", "did you mean"]),
        (["--config.rollout.tensor_parallel=()"], ["rollout.tensor_parallel"]),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(arguments, fragments):
    scripts.assert_one_sentence(plan("--config=configs/simulate.py", *arguments), *fragments)


@pytest.mark.parametrize(
    ("turns", "fragments"),
    [(None, ["trace.jsonl"]), ([{"generated_tokens": -1, "payload_tokens": 0}], ["trace.jsonl", "generated_tokens"])],
)
def test_a_trace_that_cannot_be_used_is_named_with_its_line(turns, fragments, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("" if turns is None else json.dumps({**LINE, "turns": turns}) + "\n")
    scripts.assert_one_sentence(plan("--config=configs/simulate.py", f"--trace={trace}"), *fragments)
