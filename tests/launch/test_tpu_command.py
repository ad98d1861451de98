"""launch/tpu.py: a readable script, its commands in their order against doubles of gcloud and ssh, refusals."""

import os
import stat

import golden_files
import pytest
import scripts

CONFIG = (
    "--config=configs/qwen3_1p7b_8gpu.py",
    "--config.trainer.platform=tpu",
    "--config.trainer.fsdp=8",
    "--config.trainer.rows_per_micro_batch=8",
    "--config.trainer.processes=2",
    "--config.cluster.accelerators_per_host=4",
)
POD = ("--accelerator_type=v6e-8", "--rollout_hosts=gpu-0", "--workdir=/shared/mine", "--name=mine")
WHERE = ("--project=lab", "--zone=us-east5-b", "--runtime_version=v2-alpha-tpuv6e")

DOUBLE = """#!/bin/bash
echo "$(basename "$0") $*" >>"{log}"
case "$*" in
*"queued-resources describe"*) [ -e "{log}.made" ] && echo ACTIVE; true ;;
*"queued-resources create"*) touch "{log}.made" ;;
*"tpu-vm describe"*) echo 10.0.0.7 ;;
*auth_token*) echo "token of $(wc -c) bytes" >>"{log}" ;;
*launch/train.py*) exit {status} ;;
*"queued-resources delete"*) exit {deletes} ;;
esac
"""


@pytest.fixture
def doubles(tmp_path, monkeypatch):
    """Puts doubles of gcloud and ssh first on the PATH, whose driver ends with a status; returns the log of calls."""
    log = tmp_path / "calls"

    def make(status: int = 0, deletes: int = 0):
        for name in ("gcloud", "ssh"):
            program = tmp_path / name
            program.write_text(DOUBLE.format(log=log, status=status, deletes=deletes))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return log

    return make


def test_the_script_is_the_golden_one():
    arguments = (*CONFIG, *WHERE, *POD, "--create_flags=--spot --labels=team=rl", "--setup=git -C libra-jax pull")
    result = scripts.run_forked("tpu.py", *arguments, "--dry_run")
    assert result.returncode == 0, result.stderr
    golden_files.assert_golden("tpu.sh", result.stdout)


def test_the_pod_is_asked_for_joined_by_ray_and_given_back(doubles):
    log = doubles()
    result = scripts.run_forked("tpu.py", *CONFIG, *WHERE, *POD, "--delete", "--create_flags=--spot")
    assert result.returncode == 0, result.stderr
    calls = log.read_text().splitlines()
    order = [
        "queued-resources create mine --node-id=mine --accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --spot",
        "--worker=0 --command=umask 077",
        "--worker=1 --command=umask 077",
        "ssh gpu-0 umask 077",
        ".venv/bin/ray start --head --port=6379",
        "--worker=1 --command=cd libra-jax && export RAY_AUTH_MODE=token",
        "ssh gpu-0 cd libra-jax",
        "exec .venv/bin/python launch/train.py --config=configs/qwen3_1p7b_8gpu.py",
        "ssh gpu-0 cd libra-jax && .venv/bin/ray stop",
        "queued-resources delete mine --force --quiet",
    ]
    places = [next((place for place, call in enumerate(calls) if part in call), None) for part in order]
    assert None not in places, (order[places.index(None)], calls)
    assert places == sorted(places)
    assert sum("--address=10.0.0.7:6379" in call for call in calls) == 2
    assert calls.count("token of 65 bytes") == 3, "each host gets the token, by its standard input"
    assert all("--project=lab --zone=us-east5-b" in call for call in calls if call.startswith("gcloud"))


def test_the_drivers_status_is_the_scripts_and_no_ray_and_no_token_stay_behind(doubles):
    log = doubles(status=75)
    assert scripts.run_forked("tpu.py", *CONFIG, *WHERE, *POD).returncode == 75
    calls = log.read_text().splitlines()
    driven = next(place for place, call in enumerate(calls) if "launch/train.py" in call)
    ending = [call for call in calls[driven:] if "rm -f ~/.ray/auth_token" in call]
    assert all("ray stop" in call for call in ending)
    assert ["--worker=0" in ending[0], "--worker=1" in ending[1], ending[2].startswith("ssh gpu-0 ")] == [True] * 3
    assert "queued-resources delete" not in log.read_text()


def test_the_drivers_status_is_the_scripts_also_where_the_pod_cannot_be_given_back(doubles):
    doubles(status=75, deletes=1)
    result = scripts.run_forked("tpu.py", *CONFIG, *WHERE, *POD, "--delete")
    assert result.returncode == 75, result.stderr
    assert "mine may still be asked for" in result.stderr


def test_a_pod_that_is_there_is_not_asked_for_again(doubles):
    log = doubles()
    log.with_suffix(".made").touch()
    assert scripts.run_forked("tpu.py", *CONFIG, *WHERE, *POD).returncode == 0
    assert "queued-resources create" not in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--project=",), ("--project: is needed: Google Cloud project.",)),
        (("--accelerator_type=v6e-16",), ("--accelerator_type=v6e-16: has 16 chips", "takes 2 hosts of 4")),
        (("--accelerator_type=v4-8",), ("v4-8: has 4 chips",)),
        (("--accelerator_type=tpu",), ("--accelerator_type=tpu: is no type",)),
        (("--rollout_hosts=a,b",), ("--rollout_hosts: names 2, and the run rolls out on 1",)),
        (("--workdir=mine",), ("--workdir=mine: must be absolute",)),
        (("--config.trainer.platform=cuda",), ("config.trainer.platform,", "a pod trains on tpu")),
        (("--setup=export HF_TOKEN=correct-horse",), ("--setup: the value of HF_TOKEN looks like a secret",)),
        (("--create_flags='",), ("--create_flags: cannot be read as a shell would",)),
        (("--config.task.path=hf_abcdefghijklmnopqrstuvwxyz",), ("--config.task.path: the value of task.path looks",)),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_a_sentence(arguments, fragments):
    scripts.assert_one_sentence(scripts.run_forked("tpu.py", *CONFIG, *WHERE, *POD, *arguments), *fragments)
