"""launch/kubernetes.py: readable manifests, small diffs, no secret in the clear, and sentences for what cannot be."""

import json
import os
import stat
import subprocess
import sys

import golden_files
import pytest
import scripts
import yaml

CONFIG = (
    "--config=configs/qwen3_1p7b_8gpu.py",
    "--config.cluster.accelerators_per_host=2",
    "--config.trainer.processes=2",
)
"""Four GPUs that train on two hosts, four instances on two more."""

NAMED = (*CONFIG, "--image=registry.example/libra-jax:1", "--name=mine", "--workdir=mine", "--ray_version=2.60.0")
ONE_HOST = ("--config.trainer.processes=1", "--config.cluster.accelerators_per_host=4")
TPU = ("--config.trainer.platform=tpu", "--tpu_type=tpu-v6e-slice", "--train_topology=2x2")
KINDS = {
    "rayjob": ("--kind=rayjob", "--secret=HF_TOKEN=hub/token", "--environment=HF_HUB_OFFLINE=0", "--namespace=team"),
    "jobset": ("--kind=jobset", "--ray_token_secret=ray-token", "--storage=100Gi", "--queue=batch", *TPU),
}


def render(*arguments: str) -> str:
    result = scripts.run_forked("kubernetes.py", *NAMED, *arguments, "--dry_run")
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_is_the_golden_one(kind):
    golden_files.assert_golden(f"kubernetes_{kind}.yaml", render(*KINDS[kind]))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("--config.optimizer.learning_rate=2e-6", ["+ --config.optimizer.learning_rate=2e-06"]),
        (
            "--config.rollout.tensor_parallel=(2,2,2)",  # a host each, where four instances shared two
            [
                "+ --config.rollout.tensor_parallel=(2, 2, 2)",
                *("- maxReplicas: 2", "+ maxReplicas: 3", "- minReplicas: 2", "+ minReplicas: 3"),
                *("- replicas: 2", "+ replicas: 3"),
            ],
        ),
        ("--retries=5", ["- backoffLimit: 3", "+ backoffLimit: 5"]),
    ],
)
def test_a_change_of_the_config_is_a_small_diff(setting, expected):
    golden = (golden_files.FOLDER / "kubernetes_rayjob.yaml").read_text()
    lines = golden_files.changed(golden, render(*KINDS["rayjob"], setting))
    assert sorted(" ".join(line.split()) for line in lines) == sorted(expected)


def test_hosts_and_accelerators_are_those_of_the_layout():
    made = yaml.safe_load(render("--train_selector=gpu=h100,zone=a"))
    training, rollout = made["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (training["groupName"], training["replicas"]) == ("training", 2)
    assert (rollout["groupName"], rollout["replicas"]) == ("rollout", 2)
    for group in (training, rollout):
        container = group["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert training["template"]["spec"]["nodeSelector"] == {"gpu": "h100", "zone": "a"}
    head = made["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert set(head["resources"]["limits"]) == {"cpu", "memory"}
    limits = training["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits["memory"]) == ("13", "40Gi"), "by two accelerators, and by 1.7 billion parameters"
    assert {"name": "HF_HOME", "value": "/runs/huggingface"} in head["env"], "on the claim, for all pods"


def test_a_plan_lays_the_run_out_and_is_told_to_its_driver(tmp_path):
    plan = tmp_path / "plan.json"
    rollout = [{"tensor_parallel": 2, "count": 3, "max_remaining_tokens": 8192}]
    plan.write_text(json.dumps({"train": {"data": 1, "fsdp": 4, "tensor": 1, "devices": 4}, "rollout": rollout}))
    made = yaml.safe_load(render(f"--plan={plan}"))
    training, serving = made["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (training["replicas"], serving["replicas"]) == (2, 3)
    head = made["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    (command,) = (entry["value"] for entry in head["env"] if entry["name"] == "LIBRA_JAX_COMMAND")
    assert f"--plan={plan}" in command.splitlines()


def test_a_slice_of_tpu_hosts_is_given_out_together():
    settings = ("--config.trainer.data=4", "--config.trainer.processes=8", "--config.trainer.rows_per_micro_batch=16")
    made = yaml.safe_load(render(*settings, *TPU[:2], "--train_topology=2x4"))
    training, rollout = made["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (training["replicas"], training["numOfHosts"]) == (2, 4)
    spec = training["template"]["spec"]
    assert spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x4"
    assert spec["containers"][0]["resources"]["limits"]["google.com/tpu"] == "2"
    assert "nvidia.com/gpu" in rollout["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_what_is_too_long_for_a_name_keeps_its_hash():
    arguments = (*CONFIG, "--image=i", "--config.name=Qwen3.Very-Long_Name_of_a_Run_That_Does_Not_Fit_Anywhere")
    first, second = (
        yaml.safe_load(scripts.run_forked("kubernetes.py", *arguments, f"--config.seed={seed}", "--dry_run").stdout)
        for seed in (0, 1)
    )
    for made in (first, second):
        name = made["metadata"]["name"]
        assert len(name) <= 40
        assert name.startswith("qwen3-very-long")
    assert first["metadata"]["name"] != second["metadata"]["name"]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--image=",), ("--image: name the container image", "third_party/Dockerfile.cuda makes one")),
        (
            ("--config.telemetry.wandb_project=mine",),
            ("config.telemetry.wandb_project: pods have no WANDB_API_KEY", "--secret=WANDB_API_KEY=SECRET/KEY"),
        ),
        (("--config.cluster.accelerators_per_host=0",), ("config.cluster.accelerators_per_host: is 0",)),
        (
            (*ONE_HOST, "--config.trainer.platform=auto"),
            ("config.trainer.platform: 'auto' does not say", "--train_accelerator"),
        ),
        (("--config.cluster.address=head:1",), ("config.cluster.address: 'head:1' is another cluster's",)),
        (("--config.trainer.platform=tpu",), ("--tpu_type, --train_topology: TPU hosts need both",)),
        ((*TPU[:2], "--train_topology=4x4"), ("--train_topology=4x4: a slice has 16 chips", "not a whole number")),
        (("--kind=jobset",), ("--ray_token_secret: a JobSet needs one", "kubectl create secret")),
        (("--name=Mine",), ("--name=Mine: must be at most 40 small letters",)),
        (("--workdir=/tmp/mine",), ("--workdir=/tmp/mine: must be a folder below --mount=/runs",)),
        (("--workdir=../mine",), ("--workdir=../mine: must be a folder below",)),
        (("--memory=64 GB",), ("--memory=64 GB: is no quantity of Kubernetes, like",)),
        (
            ("--environment=HF_HOME",),
            ("--environment=HF_HOME: pods have none of your variables", "--secret=HF_HOME=SECRET/KEY"),
        ),
        (("--environment=HF-HOME=x",), ("--environment=HF-HOME: is no name of a variable",)),
        (("--grace=30",), ("--grace=30: told to stop, the run takes up to 60 s (config.deadlines.grace)",)),
        (("--plan=/nowhere.json",), ("/nowhere.json",)),
        (("--rollout_selector=gpu",), ("--rollout_selector=gpu: must have the form key=value",)),
        (("--config=configs/simulate.py",), ("configs/simulate.py: is a config for launch/simulate.py",)),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_a_sentence(arguments, fragments):
    given = CONFIG[1:] if arguments[0].startswith("--config=") else NAMED
    if given is not NAMED:
        arguments, given = arguments[:1], ()
    scripts.assert_one_sentence(scripts.run_forked("kubernetes.py", *given, *arguments), *fragments)


@pytest.mark.parametrize(
    "given",
    [
        "--environment=HF_TOKEN=correct-horse",
        "--environment=HUB=hf_abcdefghijklmnopqrstuvwxyz",
        "--secret=HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz",
        "--config.task.environment_arguments={'api_key': 'correct-horse'}",
    ],
)
def test_a_secret_in_the_clear_is_refused_and_not_repeated(given):
    result = scripts.run_forked("kubernetes.py", *NAMED, given)
    scripts.assert_one_sentence(result, "secret")
    for value in ("correct-horse", "hf_abc"):
        assert value not in result.stdout + result.stderr


KUBECTL = """#!/bin/sh
echo "$@" >"$0.arguments"
cat >"$0.input"
{end}
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("echo rayjob.ray.io/mine created", "created"),
        ("echo rayjob.ray.io/mine unchanged", "mine exists already: to start it again, first kubectl delete"),
        ("echo 'error: unknown field \"spec.entrypoints\"' >&2; exit 1", "error: kubectl refused it: error: unknown"),
    ],
)
def test_the_manifest_goes_to_kubectl(end, said, tmp_path, monkeypatch):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL.format(end=end))
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = scripts.run_forked("kubernetes.py", *NAMED, *KINDS["rayjob"])
    assert said in result.stdout + result.stderr
    assert (result.returncode == 0) == ("exit" not in end)
    assert (tmp_path / "kubectl.arguments").read_text().split() == ["apply", "-f", "-"]
    golden_files.assert_golden("kubernetes_rayjob.yaml", (tmp_path / "kubectl.input").read_text())


def test_without_kubectl_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    scripts.assert_one_sentence(scripts.run_forked("kubernetes.py", *NAMED), "there is no kubectl", "--dry_run")


def test_a_manifest_can_go_to_a_file(tmp_path):
    file = tmp_path / "folder" / "run.yaml"
    assert render(*KINDS["rayjob"], f"--output={file}") == ""
    golden_files.assert_golden("kubernetes_rayjob.yaml", file.read_text())


def test_libraries_that_look_for_the_kubernetes_client_do_not_get_the_script():
    code = "import sys; sys.path.insert(0, 'launch'); import kubernetes"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=scripts.ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "ImportError: launch/kubernetes.py is a script" in done.stderr
