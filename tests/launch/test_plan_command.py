"""`launch/plan.py` as a user meets it: a table, a file, a picture, and one sentence for each kind of bad input."""

import functools
import json
import re

import pytest
import scripts

from libra_jax.utils import checksums

plan = functools.partial(scripts.run_forked, "plan.py")
LINE = {"trajectory_id": "0/0", "prompt_id": "0", "prompt_tokens": 200}


def test_a_plan_is_printed_written_and_drawn_and_uses_no_more_than_there_is(tmp_path):
    output = tmp_path / "plan.json"
    result = plan("--config=configs/simulate.py", "--accelerators=64", f"--output={output}")
    assert result.returncode == 0, result.stderr
    made = json.loads(output.read_text())
    parts = ["for", "train", "rollout", "predicted", "uncertainty", "solve_seconds", "calibrated", "checksum"]
    assert list(made) == parts
    assert list(made["uncertainty"]) == list(made["predicted"])
    assert all(0.05 < share < 1.0 for share in made["uncertainty"].values())
    assert list(made["train"]) == ["devices", "data", "fsdp", "tensor", "context"]
    train, buckets = made["train"], made["rollout"]
    assert train["devices"] == train["data"] * train["fsdp"] * train["tensor"] * train["context"]
    assert train["devices"] + sum(item["count"] * item["tensor_parallel"] for item in buckets) <= 64
    assert [list(item) for item in buckets] == [["tensor_parallel", "count", "max_remaining_tokens"]] * len(buckets)
    predicted = made["predicted"]
    # Waiting, and steps that are unlike, come on top of both stages.
    assert predicted["step_seconds"] >= max(predicted["train_seconds"], predicted["rollout_seconds"])
    assert made["calibrated"] is False
    assert (made["for"]["model"], made["for"]["hardware"], made["for"]["accelerators"]) == ("Qwen3-14B", "a800", 64)
    assert "not calibrated" in result.stdout
    assert "Runner-up:" in result.stdout
    assert output.with_suffix(".svg").read_text().startswith("<?xml")


def test_one_command_plans_other_machine_model_and_lengths(tmp_path):
    """Without a trace, without weights, and without a config: the question that README answers."""
    output = tmp_path / "plan.json"
    flags = ("--hardware=h100", "--model=Qwen3-8B", "--accelerators=16", "--workload=search")
    result = plan(*flags, "--generated_tokens=4000,7000", "--turns=5", "--payload_tokens=300", f"--output={output}")
    assert result.returncode == 0, result.stderr
    made = json.loads(output.read_text())
    assert made["for"]["model"] == "Qwen3-8B"
    assert made["for"]["hardware"] == "h100"
    assert made["for"]["lengths"]["generated_mean"] == pytest.approx(4000, rel=0.01)
    assert made["for"]["lengths"]["generated_p90"] == pytest.approx(7000, rel=0.01)
    assert made["for"]["lengths"]["turns_mean"] == 5
    train = made["train"]["devices"]
    assert f"Qwen3-8B (8.19 billion parameters) on 16 h100: {train} train, " in result.stdout
    assert "4,000 generated tokens in the mean" in result.stdout
    assert "a staleness of at most 1 (config.coordinator.max_staleness)" in result.stdout
    assert "of its 72 usable GB (1e9 bytes): weights, optimizer, gradients" in result.stdout
    drawn = output.with_suffix(".svg").read_text()
    assert "Qwen3-8B (8.19 billion parameters) on 16 h100" in drawn


@pytest.mark.parametrize(("train", "hosts"), [(8, 2), (4, 3)])
def test_a_job_of_a_plan_has_as_many_hosts_as_were_planned(train, hosts, tmp_path):
    """No host both trains and rolls out, so 4 and 12 of 16 accelerators are not 2 hosts of 8."""
    mesh = {"devices": train, "data": 1, "fsdp": train, "tensor": 1, "context": 1}
    buckets = [{"tensor_parallel": 1, "count": 16 - train, "max_remaining_tokens": 8192}]
    (tmp_path / "plan.json").write_text(json.dumps({"for": {"accelerators": 16}, "train": mesh, "rollout": buckets}))
    laid_out = "--config.cluster.accelerators_per_host=8", f"--plan={tmp_path / 'plan.json'}"
    result = scripts.run_forked("slurm.py", "--config=configs/qwen3_1p7b_8gpu.py", *laid_out, "--dry_run")
    if hosts == 2:
        assert "\n#SBATCH --nodes=2\n" in result.stdout
    else:
        scripts.assert_one_sentence(result, "--plan: 16 accelerators are 2 hosts of 8", "this plan takes 3", "plan in")


def test_degrees_that_do_not_divide_the_model_are_left_out(tmp_path):
    """Qwen2.5-0.5B has 14 attention heads, which neither 4 nor 8 divides."""
    output = tmp_path / "plan.json"
    model = "--config.simulation.model=Qwen2.5-0.5B"
    result = plan("--config=configs/simulate.py:search", model, "--generated_tokens=2000", f"--output={output}")
    assert result.returncode == 0, result.stderr
    told = "gives the mean alone, so the spread of the workload search is assumed: P90 6,"
    assert told in result.stdout
    assert "Give mean,P90 for another, like --generated_tokens=2000,3500." in result.stdout
    assert {item["tensor_parallel"] for item in json.loads(output.read_text())["rollout"]} <= {1, 2}


def test_a_sweep_says_what_each_case_comes_to_and_which_has_no_plan():
    result = plan("--config=configs/simulate.py", "--sweep=hardware", "--accelerators=64")
    assert result.returncode == 0, result.stderr
    for name in ("a100", "h200", "v5p"):
        assert re.search(rf"│ {name} +│ \d+", result.stdout), f"{name} has a mesh"
    assert result.stdout.startswith("Qwen3-14B on 64 accelerators; swe: ")
    assert "v5e: the model trains on no mesh of 64 v5e devices" in result.stdout


@pytest.mark.slow
def test_other_numbers_and_lengths_are_swept_and_few_accelerators_do_more_each():
    result = plan("--config=configs/simulate.py:search", "--sweep=lengths")
    assert result.returncode == 0, result.stderr
    steps = [float(step) for step in re.findall(r"│ x \S+ .*?│ +([\d.]+) +│ [\d.]+ +│ [\d.]+ +│$", result.stdout, re.M)]
    assert len(steps) == 4
    assert steps == sorted(steps)
    thrifty = plan("--config=configs/simulate.py:search", "--objective=per_accelerator")
    assert thrifty.returncode == 0, thrifty.stderr
    assert "accelerators have no use" in thrifty.stdout


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--sweep=lengths", "--output=plan.json"], ["--output: a sweep writes no file"]),
        (["--sweep=lengths", "--objective=cheapest"], ["--within: give the seconds of a step"]),
        (["--objective=cheapest", "--within=nan"], ["--within: nan is no time that a step may take"]),
        (["--accelerators=1"], ["--accelerators: 1 cannot both train and roll out"]),
        (["--accelerators=1000000000000"], ["--accelerators: 1,000,000,000,000 are more", "at most 1,000,000"]),
        (["--config.planner.hardware=h100"], ["--config.planner.hardware: ", "config.simulation.hardware counts"]),
        (["--generated_tokens=4000,20000"], ["--generated_tokens: no log-normal", "between 4,000 and 9,092"]),
        (["--accelerators=4"], ["the model trains on no mesh of 4 a800 devices", "GB", "(training alone needs "]),
        (["--model=Someone/Qwen3-8B"], ["error: --model: 'Someone/Qwen3-8B' is not one of", "did you mean 'Qwen3-8B'"]),
        (
            ["--hardware=h100", "--model=Qwen3-8B", "--generated_tokens=4000000"],
            ["--generated_tokens: beside the weights"],
        ),
        (["--config.simulation.hardware=a900"], ["error: config.simulation.hardware: 'a900' is not one of"]),
        (["--hardware=a900"], ["error: --hardware: 'a900' is not one of", "did you mean"]),
        (["--model=Qwen3-15B"], ["error: --model: 'Qwen3-15B' is not one of", "did you mean"]),
        (["--config.rollout.tensor_parallel=()"], ["rollout.tensor_parallel"]),
        (
            ["--config.simulation.coefficients.network_share=-1"],
            ["network_share: must lie in (0, 1], not -1"],
        ),
        (["--config.simulation.coefficients.step_overhead=nan"], ["simulation.coefficients.step_overhead", "nan"]),
        (["--config.simulation.coefficients.chunk_tokens=0"], ["coefficients.chunk_tokens: must be positive"]),
        (["--objective=cheapest"], ["--within: give"]),
        (["--objective=cheapest", "--within=5"], ["no plan of 48 devices takes a step in 5 s; the fastest takes"]),
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


def test_a_real_run_is_planned_from_a_trace_and_laid_out_by_the_plan(tmp_path):
    turn = {
        "generated_tokens": 30,
        "payload_tokens": 20,
        "tool": "calculator",
        "status": "success",
        "tool_seconds": 0.1,
    }
    trace, output = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    lines = [json.dumps({**LINE, "prompt_tokens": 40, "turns": [turn] * (1 + index % 3)}) for index in range(30)]
    trace.write_text("\n".join(lines) + "\n")
    config = "--config=configs/planned_cpu.py"
    scripts.assert_one_sentence(plan(config), "--trace: the config of a real run has no workload")
    result = plan(config, f"--trace={trace}", "--accelerators=5", f"--output={output}")
    assert result.returncode == 0, result.stderr
    made = json.loads(output.read_text())
    shown = scripts.run_forked("train.py", config, f"--plan={output}", "--dry_run")
    assert shown.returncode == 0, shown.stderr
    assert f"data={made['train']['data']} fsdp={made['train']['fsdp']}" in shown.stdout
    wide = sum(bucket["count"] for bucket in made["rollout"])
    assert sum(line.startswith("  rollout-") for line in shown.stdout.splitlines()) == wide


def test_a_simulation_is_laid_out_by_a_plan_and_a_file_that_is_none_is_refused(tmp_path):
    output = tmp_path / "plan.json"
    search = ("--config=configs/simulate.py:search", "--config.steps=1", "--config.coordinator.groups_per_step=4")
    assert plan(*search, f"--output={output}").returncode == 0
    simulated = scripts.run_forked("simulate.py", *search, f"--plan={output}", "--policies=cmlfq", "--jobs=1")
    assert simulated.returncode == 0, simulated.stderr
    assert "cmlfq" in simulated.stdout
    written, made = output.read_text(), checksums.read_object(output)
    none = {**made, "rollout": [{**made["rollout"][0], "count": 0}]}
    other = {**made, "train": {**made["train"], "data": 7 * made["train"]["data"]}}
    twice = {**made, "rollout": [made["rollout"][0]] * 2}
    for text, fragment in (
        (json.dumps(none), "at least one instance"),
        (json.dumps(other), "data x fsdp x tensor x context are"),
        (json.dumps(twice), "degrees and bounds of rollout must ascend"),
        ("{}", "no plan of launch/plan.py: it has no train"),
        (written.replace('"devices": ', '"devices": 1'), "its checksum is not the one it was written with"),
    ):
        output.write_text(text)
        refused = scripts.run_forked("simulate.py", *search, f"--plan={output}", "--policies=cmlfq")
        scripts.assert_one_sentence(refused, "plan.json", fragment)
    missing = scripts.run_forked(
        "train.py", "--config=configs/planned_cpu.py", f"--plan={tmp_path / 'none.json'}", "--dry_run"
    )
    scripts.assert_one_sentence(missing, "none.json: the plan cannot be read")
