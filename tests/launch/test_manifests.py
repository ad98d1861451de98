"""Manifests against the API as others published it: Kubernetes' and JobSet's, in kubeflow-trainer-api's models."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from support import manifests, rendering

import crds
import pytest

from libra_jax.protocols import ConfigError

published = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")

JOB = manifests.Job(
    name="mine",
    image="registry.example/libra-jax:1",
    command=["python", "launch/train.py", "--config.name=$(HOME)"],
    groups=[
        manifests.Group("training", 8, 4, "tpu", {"cloud.google.com/gke-tpu-topology": "4x4"}, slice_hosts=4),
        manifests.Group("rollout", 3, 8, "gpu", {"gpu": "h100"}),
        manifests.Group("cpu", 2),
    ],
    claim="runs",
    workdir="/runs/mine",
    namespace="team",
    service_account="trainer",
    storage="100Gi",
    storage_class="shared",
    environment={"HF_HUB_OFFLINE": "0"},
    secrets={"HF_TOKEN": ("hub", "token")},
    secrets_from=["judge"],
    token_secret="ray-token",
    pull_secret="registry",
    queue="batch",
    ray_version="2.60.0",
)


def unknown(given: Any, understood: Any, where: str = "") -> Iterator[str]:
    """What the published models did not keep: fields that they do not have, values that they read otherwise."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(understood, dict) or key not in understood:
                yield f"{where}.{key}"
            else:
                yield from unknown(value, understood[key], f"{where}.{key}")
    elif isinstance(given, list):
        for index, (one, other) in enumerate(zip(given, understood, strict=True)):
            yield from unknown(one, other, f"{where}[{index}]")
    elif given != understood:
        yield f"{where} = {given!r}"


def assert_understood(model: str, given: dict[str, Any]) -> None:
    understood = getattr(published, model).from_dict(given).to_dict()
    assert list(unknown(given, understood)) == []


def rendered(kind: manifests.Kind, **changed: Any) -> dict[str, Any]:
    return manifests.documents(dataclasses.replace(JOB, **changed), kind)[-1]


def test_a_jobset_is_as_published():
    assert_understood("JobsetV1alpha2JobSet", rendered("jobset"))


def test_the_pods_and_the_claim_of_a_rayjob_are_as_published():
    claim, job = manifests.documents(JOB, "rayjob")
    assert_understood("IoK8sApiCoreV1PersistentVolumeClaim", claim)
    cluster = job["spec"]["rayClusterSpec"]
    templates = [entry["template"] for entry in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert len(templates) == 4
    for template in templates:
        assert_understood("IoK8sApiCoreV1PodTemplateSpec", template)


FIELDS = pathlib.Path(__file__).parent / "published" / "rayjob.yaml"


def test_a_rayjobs_own_fields_are_those_of_kuberays_reference():
    crds.check(rendered("rayjob"), FIELDS)
    crds.check(rendered("rayjob", token_secret="", ray_version=""), FIELDS)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("backoffLimit",), "3", "spec.backoffLimit: '3' is not of type 'integer'"),
        (("submissionMode",), "PodMode", "'PodMode' is not one of"),
        (("rayClusterSpec", "auth"), {"mode": "token"}, "spec.rayClusterSpec: .*'auth' was unexpected"),
        (("rayClusterSpec", "authOptions", "mode"), "on", "'on' is not one of"),
        (("rayClusterSpec", "workerGroupSpecs", 0, "hosts"), 4, "'hosts' was unexpected"),
    ],
)
def test_a_field_that_kuberay_does_not_have_is_noticed(path, value, problem):
    job = rendered("rayjob")
    place = job["spec"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ConfigError, match=problem):
        crds.check(job, FIELDS)


def test_the_published_models_notice_a_wrong_field():
    job = rendered("jobset")
    job["spec"]["successPolicy"]["targets"] = ["head"]
    with pytest.raises(AssertionError, match=r"successPolicy\.targets"):
        assert_understood("JobsetV1alpha2JobSet", job)
    job = rendered("jobset", retries="3")
    with pytest.raises(ValueError, match="maxRestarts"):
        assert_understood("JobsetV1alpha2JobSet", job)


def test_a_pod_that_is_taken_away_costs_a_jobset_no_retry_and_one_that_fails_costs_one():
    spec = rendered("jobset", retries=2)["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert spec["failurePolicy"]["maxRestarts"] == 2
    for job in spec["replicatedJobs"]:
        (policy,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert policy == {"action": "FailJob", "onPodConditions": [{"status": "True", "type": "DisruptionTarget"}]}
        assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # without which it is refused


def containers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of all pods."""
    if isinstance(job, dict):
        yield from job.get("containers", ())
    for value in job.values() if isinstance(job, dict) else job if isinstance(job, list) else ():
        yield from containers(value)


@pytest.mark.parametrize("kind", ["rayjob", "jobset"])
def test_every_pod_has_the_claim_and_the_grace_and_secrets_by_reference(kind):
    job = rendered(kind)
    pods = list(containers(job))
    assert len(pods) == 4
    for container in pods:
        variables = {entry["name"]: entry for entry in container["env"]}
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
        assert variables["LIBRA_JAX_WORKDIR"]["value"] == "/runs/mine"
        assert container["envFrom"] == [{"secretRef": {"name": "judge"}}]
        assert {"mountPath": "/runs", "name": "runs"} in container["volumeMounts"]
    text = rendering.dump([job])
    assert text.count("terminationGracePeriodSeconds: 120") == 4
    assert text.count("claimName: runs") == 4


@pytest.mark.parametrize("kind", ["rayjob", "jobset"])
def test_kubernetes_does_not_replace_what_the_command_says(kind):
    assert "--config.name=$$(HOME)" in rendering.dump([rendered(kind)])


def test_ray_shows_its_token_whatever_the_kind():
    assert rendered("rayjob")["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert rendered("rayjob", token_secret="")["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    for container in containers(rendered("jobset")):
        variables = {entry["name"]: entry for entry in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "ray-token", "key": "auth_token"}
    with pytest.raises(ConfigError, match="--ray_token_secret: a JobSet needs one"):
        manifests.documents(dataclasses.replace(JOB, token_secret=""), "jobset")


def test_the_driver_decides_when_a_jobset_is_done_and_a_lost_host_starts_it_anew():
    spec = rendered("jobset")["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["head"]}
    assert spec["failurePolicy"]["maxRestarts"] == 3
    jobs = {entry["name"]: entry for entry in spec["replicatedJobs"]}
    assert all(entry["template"]["spec"]["backoffLimit"] == 0 for entry in jobs.values())
    training = jobs["training"]
    assert (training["replicas"], training["template"]["spec"]["parallelism"]) == (2, 4), "a job a slice"
    assert "alpha.jobset.sigs.k8s.io/exclusive-topology" in training["template"]["metadata"]["annotations"]
    assert (jobs["rollout"]["replicas"], jobs["rollout"]["template"]["spec"]["parallelism"]) == (1, 3)


@pytest.mark.parametrize(("kind", "file"), [("rayjob", "rayjobs.yaml"), ("jobset", "jobsets.yaml")])
def test_a_manifest_is_as_the_definitions_of_a_cluster_have_it(kind, file):
    folder = os.environ.get("LIBRA_JAX_CRDS")
    if not folder:
        pytest.skip("LIBRA_JAX_CRDS names no folder with rayjobs.yaml and jobsets.yaml (kubectl get crd ... -o yaml)")
    crds.check(rendered(kind), pathlib.Path(folder) / file)


@pytest.mark.parametrize("kind", ["rayjob", "jobset"])
def test_no_value_ends_the_line_that_it_stands_in(kind):
    hostile = "a\"'\n  evil: {{ job.name }} # &x *x\n- <b>"
    job = rendered(kind, namespace=hostile, image=hostile, environment={"A": hostile}, secrets_from=[hostile])
    assert job["metadata"]["namespace"] == hostile
    for container in containers(job):
        assert container["image"] == hostile
        assert {"name": "A", "value": hostile} in container["env"]
        assert container["envFrom"] == [{"secretRef": {"name": hostile}}]
