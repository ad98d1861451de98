"""`launch/simulate.py` as a user meets it: its files, that they repeat, and one sentence for each kind of bad input."""

import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import scripts

KEYS = [
    "policy",
    "seed",
    "tokens_per_second",
    "step_seconds",
    "utilisation",
    "migrated_token_fraction",
    "one_shot_routing_accuracy",
    "kv_recompute_token_fraction",
    "staleness_max",
    "lost_trajectories",
    "duplicated_trajectories",
    "replaced_trajectories",
    "trained_trajectories",
    "trained_tokens_mean",
    "wall_seconds",
]
SMALL = (
    "--config.coordinator.groups_per_step=2",
    "--config.coordinator.group_size=3",
    "--config.workload.passes=1",
    "--config.steps=3",
)

simulate = functools.partial(scripts.run_forked, "simulate.py")


def record(index: int, tokens: tuple[int, ...]) -> str:
    turns = [
        {"generated_tokens": count, "tool": "bash", "status": "success", "payload_tokens": 300, "tool_seconds": 2.0}
        for count in tokens
    ]
    return json.dumps({"trajectory_id": f"{index}/0", "prompt_id": str(index), "prompt_tokens": 200, "turns": turns})


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("\n".join(record(index, (200, 50 * (index + 1), 400)) for index in range(6)) + "\n")
    return path


def without_wall_seconds(path: pathlib.Path) -> str:
    return re.sub(r'"wall_seconds": [0-9.e-]+', "", path.read_text())


def test_a_comparison_writes_a_table_the_entries_the_bound_and_a_picture_and_repeats(trace, tmp_path):
    arguments = (f"--trace={trace}", "--policies=cmlfq,sticky", "--seeds=0,1", *SMALL)
    first, second = tmp_path / "runs" / "first.json", tmp_path / "second.json"
    result = simulate(*arguments, f"--output={first}", "--jobs=2")
    assert result.returncode == 0, result.stderr
    assert "[4/4] sticky, seed 1:" in result.stderr
    assert "3 steps, 18 trajectories" in result.stderr
    lines = result.stdout.splitlines()
    machine = "Qwen3-14B on 48 a800: 20 train, instances 6 of degree 1, 3 of degree 2, 2 of degree 4, 1 of degree 8"
    assert lines[0] == machine
    assert lines[1].startswith("trace.jsonl: 701 generated tokens in the mean")
    assert [line.split()[0] for line in lines[2:5]] == ["policy", "cmlfq", "sticky"]
    written = json.loads(first.read_text())
    assert list(written) == ["for", "policies", "bound_seconds", "config"]
    assert (written["for"]["model"], written["for"]["hardware"]) == ("Qwen3-14B", "a800")
    assert written["for"]["instances"] == {"1": 6, "2": 3, "4": 2, "8": 1}
    assert written["for"]["lengths"]["generated_max"] == 1218
    assert written["config"]["workload"]["trace"] == str(trace)
    assert [(entry["policy"], entry["seed"]) for entry in written["policies"]] == [
        ("cmlfq", 0), ("cmlfq", 1), ("sticky", 0), ("sticky", 1),
    ]  # fmt: skip
    for entry in written["policies"]:
        assert list(entry) == KEYS
        assert list(entry["step_seconds"]) == ["mean", "p50", "p90", "p99"]
        assert list(entry["utilisation"]) == ["train", "rollout"]
        assert entry["lost_trajectories"] == entry["duplicated_trajectories"] == 0
        assert entry["staleness_max"] <= 1
    assert 0 < written["bound_seconds"] < min(entry["step_seconds"]["mean"] for entry in written["policies"])
    picture = first.with_suffix(".svg").read_text()
    assert picture.startswith("<?xml")
    assert "Qwen3-14B on 48 a800" in picture
    causes = json.loads((tmp_path / "runs" / "first-causes.json").read_text())
    assert [(state["tool"], state["status"], state["count"]) for state in causes["states"]] == [("bash", "success", 12)]
    assert (tmp_path / "runs" / "first-causes.svg").read_text().startswith("<svg xmlns")
    assert "What the tool returns of" in result.stdout
    assert "Causal states alone account for none of the variance of what is left after 12 returns." in result.stdout
    again = simulate(*arguments, f"--output={second}", "--jobs=1")
    assert again.returncode == 0, again.stderr
    assert without_wall_seconds(first) == without_wall_seconds(second)


def test_the_software_engineering_workload_runs_without_a_trace():
    result = simulate("--policies=least_loaded", "--config.coordinator.groups_per_step=2", "--config.steps=2")
    assert result.returncode == 0, result.stderr
    assert "simulate-swe: 2 steps, 64 trajectories" in result.stderr


def bad_trace(path: pathlib.Path, tokens: int) -> str:
    path.write_text(record(0, (5, 6)) + "\n" + record(1, (5, tokens)) + "\n")
    return f"--trace={path}"


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["--policies=cmlfk"], ["--policies", "did you mean 'cmlfq'"]),
        (["--seeds=0,x"], ["--seeds", "'x' is no seed"]),
        (["--config.scheduler.max_remaining_tokens=(9,3,4)"], ["scheduler.max_remaining_tokens", "must ascend"]),
        (
            ["--config.simulation.slots=()", "--config.rollout.slots=4000"],
            ["rollout.slots", "exceed the memory", "full context"],
        ),
        (["--config.simulation.hardware=b200x"], ["config.simulation.hardware: 'b200x' is not one of", "'h200'"]),
        (["--config.simulation.model=GPT5"], ["config.simulation.model: 'GPT5' is not one of"]),
        (["--config.planner.period=2"], ["config.planner.period: what is compared here has one layout", "sweep.py"]),
        (["--config.planner.hardware=h100"], ["--config.planner.hardware: ", "config.simulation.hardware counts"]),
        (["--config.optimizer.learning_rate=1e-6"], ["--config.optimizer.learning_rate: launch/simulate.py does not"]),
        (["--config.simulation.hardwre=h100"], ["did you mean simulation.hardware"]),
        (["--config=configs/simulate.py:serch"], ["swe, search, math", "'serch'"]),
        (["--trace=/dev/null"], ["/dev/null", "holds no trajectory"]),
    ],
)  # fmt: skip
def test_nonsense_is_answered_with_one_sentence(flags, fragments):
    scripts.assert_one_sentence(simulate(*flags), *fragments)


def test_a_turn_with_negative_tokens_is_named_by_file_and_line(tmp_path):
    result = simulate(bad_trace(tmp_path / "bad.jsonl", -6))
    scripts.assert_one_sentence(result, "bad.jsonl, line 2, turn 1", "generated_tokens", "-6")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_workers_end_with_the_command_however_it_is_ended(number, code):
    """SIGTERM ends it without a chance to clean up; Ctrl-C reaches the whole group, and is answered with a sentence."""
    command = [sys.executable, "launch/simulate.py", "--jobs=2"]  # seven policies: some wait for a worker
    process = subprocess.Popen(command, cwd=scripts.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    workers: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while len(workers) < 2 and time.monotonic() < deadline:  # at work: it takes a second to begin
            time.sleep(0.1)
            children = psutil.Process(process.pid).children()
            workers = [child for child in children if child.cpu_times().user > 3.0]
        assert len(workers) == 2
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code
        assert "Traceback" not in stderr
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert all(worker.status() == psutil.STATUS_ZOMBIE for worker in alive)  # no one may reap them here
    finally:
        for one in (process, *workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def test_slots_that_hold_nothing_are_refused_before_anything_runs():
    slots = ",".join(["0"] * 12)
    result = simulate(f"--config.simulation.slots=({slots})", "--policies=cmlfq")
    assert result.returncode == 2
    assert "config.simulation.slots: must be positive" in result.stderr


def test_a_config_of_a_real_run_is_sent_to_the_script_that_it_is_for():
    result = simulate("--config=configs/quickstart.py", "--policies=cmlfq")
    assert result.returncode == 2
    assert "is no simulated run" in result.stderr
