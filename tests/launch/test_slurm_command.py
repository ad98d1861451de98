"""`launch/slurm.py` as a user meets it where there is no Slurm."""

import functools
import json
import os
import subprocess
import sys

import pytest
import scripts

from configs import quickstart
from libra_jax import config as config_lib

slurm = functools.partial(scripts.run_forked, "slurm.py", "--config=configs/quickstart.py")


def test_dry_run_prints_the_script_and_leaves_nothing_behind(tmp_path):
    workdir = tmp_path / "run"
    result = slurm("--config.steps=7", "--config.rollout.tensor_parallel=(1,1)", "--dry_run", f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("#!/usr/bin/env bash\n# quickstart: one host trains and rolls out\n")
    lines = result.stdout.splitlines()
    begin = lines.index("driver=(")
    assert lines[begin + 1 : lines.index(")", begin)] == [
        '  "$python" "$launch/train.py"',
        "  --config=configs/quickstart.py",
        "  --config.cluster.address=auto",
        "  --config.cluster.backend=ray",
        "  '--config.rollout.tensor_parallel=(1, 1)'",
        "  --config.steps=7",
        '  --workdir="$workdir"',
    ]
    assert not workdir.exists()


def test_the_drivers_arguments_give_the_config_that_was_checked(tmp_path):
    """What is passed on is read back by the script that it is passed to."""
    result = slurm("--config.rollout.tensor_parallel=(1,2)", "--config.name=it's mine", "--dry_run")
    assert result.returncode == 0, result.stderr
    begin, _, _ = result.stdout.partition("# Each attempt")
    driver = begin[begin.index("driver=(") :]
    program = f'python={sys.executable}; launch=launch; workdir={tmp_path}; {driver}\n"${{driver[@]}}" --dry_run'
    shown = subprocess.run(
        ["bash", "-c", program], cwd=scripts.ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert """--config.name="it's mine"\n""" in shown.stdout
    assert "rollout-1 devices 2-3: tensor parallel 2" in shown.stdout


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (
            ("--config=configs/simulate.py",),
            ("--config=configs/simulate.py: is a config for launch/simulate.py", "give it to that script"),
        ),
        (("--config.cluster.backend=ray", "--config.cluster.address=here:1"), ("config.cluster.address: ", "empty")),
        (("--setup=export HF_TOKEN=correct-horse",), ("--setup: the value of HF_TOKEN looks like a secret", "NAME")),
        (("--sbatch=--export=ALL,WANDB_API_KEY=correct",), ("--sbatch: the value of WANDB_API_KEY looks like",)),
        (("--config.rollout.slots=0",), ("config.rollout.slots", "must be positive")),
        (("--grace=0",), ("flag --grace=0: ",)),
        (("--account=team\nrm -rf /",), ("--account: 'team\\nrm -rf /' holds a line break", "on one line")),
        (("--sbatch=--mem=64G\n#",), ("--sbatch: ", "holds a line break")),
        ((), ("sbatch is not on PATH", "login node", "--dry_run")),
    ],
)
def test_bad_input_gets_one_sentence(monkeypatch, tmp_path, flags, fragments):
    monkeypatch.setenv("PATH", str(tmp_path))
    scripts.assert_one_sentence(slurm(f"--workdir={tmp_path / 'run'}", *flags), *fragments)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_says_what_is_a_guess_and_what_stays_idle(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = ("--config=configs/questions.py:no-one/none-such", "--config.trainer.platform=cuda", "--dry_run")
    result = scripts.run_forked("slurm.py", *flags, "--config.cluster.accelerators_per_host=8")
    assert result.returncode == 0, result.stderr
    assert "1 of 8 on host 0, 1 of 8 on host 1, so 14 stay idle" in result.stderr
    assert "the memory of a host is a guess; give --memory" in result.stderr
    assert "is a guess" not in scripts.run_forked("slurm.py", *flags, "--memory=64G").stderr


def test_a_dry_run_refuses_a_workdir_that_a_file_is_in_the_way_of(tmp_path):
    file = tmp_path / "file"
    file.touch()
    result = slurm(f"--workdir={file / 'run'}", "--dry_run")
    scripts.assert_one_sentence(result, f"--workdir={file / 'run'} cannot be used ({file} is a file)")


def test_a_change_that_is_allowed_is_submitted(monkeypatch, tmp_path):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)
    values = config_lib.to_dict(quickstart.get_config())
    values["cluster"] |= {"backend": "ray", "address": "auto"}
    begun = config_lib.to_dict(config_lib.parse(config_lib.RunConfig, values))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(begun, default=list))
    changed = ("--config.optimizer.learning_rate=0.5", "--allow_changes=optimizer.learning_rate")
    result = slurm(f"--workdir={tmp_path / 'run'}", *changed)
    assert (result.returncode, result.stdout) == (0, "7\n"), result.stderr
    assert json.loads((tmp_path / "run/config.json").read_text())["optimizer"]["learning_rate"] == 0.5
    assert "  --allow_changes=optimizer.learning_rate\n" in (tmp_path / "run/slurm.sbatch").read_text()
