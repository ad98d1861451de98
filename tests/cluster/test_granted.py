"""Which node is which host, and what a cluster is refused for."""

from __future__ import annotations

import dataclasses

import pytest

from libra_jax import config as config_lib
from libra_jax.cluster import granted, hosts
from libra_jax.protocols import LibraError


def node(name: str, gpus: float = 8, **versions: str) -> granted.GrantedNode:
    return granted.GrantedNode(f"id-{name}", name, f"10.0.0.{name}", {"GPU": gpus, "CPU": 64.0}, ("0",), versions)


def test_hosts_of_one_shape_follow_the_names_of_the_nodes_as_people_sort_them():
    full, half = {"GPU": 8.0}, {"GPU": 4.0}
    shapes = [full, full, half, full, half]
    names = ["node-10", "node-2", "node-3", "node-1", "node-11"]
    bundles = granted.by_name(shapes, [node(name) for name in names])
    assert [names[bundle] for bundle in bundles] == ["node-1", "node-2", "node-3", "node-10", "node-11"]
    assert all(shapes[bundle] == shape for bundle, shape in zip(bundles, shapes, strict=True))


def test_a_host_does_not_change_places_with_one_that_may_only_do_something_else():
    nodes = [dataclasses.replace(node(name), role=role) for name, role in (("z2", "training"), ("z1", "training"))]
    nodes += [dataclasses.replace(node(name), role="rollout") for name in ("a2", "a1")]
    assert granted.by_name([{"GPU": 8.0}] * 4, nodes) == (1, 0, 3, 2)


def test_names_without_numbers_or_of_mixed_forms_can_be_sorted():
    assert sorted(["gpu-b", "10.0.0.9", "gpu-a", "10.0.0.10", ""], key=granted.natural) == [
        "",
        "10.0.0.9",
        "10.0.0.10",
        "gpu-a",
        "gpu-b",
    ]


@pytest.mark.parametrize(
    ("needs", "have", "message"),
    [
        ([8, 8], [8, 8, 0], ""),
        ([8, 2], [2, 8], ""),
        ([1, 1, 1], [8, 8], "takes 3 hosts (1 GPU each), and the Ray cluster has 2 (node-0, node-1); start more"),
        (
            [4, 4],
            [8, 3],
            "(4 GPUs each), 8 in all, and of the Ray cluster's 2, node-0 has 8, node-1 has 3",
        ),
        (
            [8, 4],
            [4, 4],
            "(8, 4 GPUs), 12 in all, and of the Ray cluster's 2, node-0 has 4, node-1 has 4",
        ),
    ],
)
def test_a_cluster_that_can_never_hold_the_run_is_refused_with_what_it_has(needs, have, message):
    found = granted.refusal(needs, "GPU", [node(f"node-{number}", count) for number, count in enumerate(have)])
    assert message in found
    assert bool(found) == bool(message)


def test_hosts_of_a_role_that_too_few_nodes_may_have_are_refused():
    layout = hosts.layout(
        config_lib.RunConfig(
            trainer=config_lib.TrainerConfig(data=2, processes=2, rows_per_micro_batch=2),
            rollout=config_lib.RolloutConfig(tensor_parallel=(1,)),
            cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=1),
        )
    )
    a, b, c = (dataclasses.replace(node(name, 1), role="rollout" * (name != "a")) for name in "abc")
    assert granted.why_not(layout, "GPU", [a, dataclasses.replace(b, role="training"), c]) == ""
    assert "takes 2 hosts to train (1 GPU each), and the Ray cluster has 1 (a) that may do that (libra-role);" in (
        granted.why_not(layout, "GPU", [a, b, c])
    )


def test_a_shortage_of_cpus_is_told_as_such_and_not_as_one_of_accelerators():
    layout = hosts.layout(
        config_lib.RunConfig(
            trainer=config_lib.TrainerConfig(data=2, rows_per_micro_batch=2),
            rollout=config_lib.RolloutConfig(tensor_parallel=(2,)),
            cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=2),
        )
    )
    enough, few = ({"GPU": 2.0, "CPU": cpus} for cpus in (2.0, 1.0))
    nodes = [granted.GrantedNode(name, name, name, has) for name, has in (("a", enough), ("b", few))]
    assert granted.why_not(layout, "GPU", [nodes[0], dataclasses.replace(nodes[1], resources=enough)]) == ""
    assert granted.why_not(layout, "GPU", nodes) == (
        "config.cluster.accelerators_per_host: the run takes as many CPUs of its 2 hosts as GPUs (2 CPUs each), and of "
        "the Ray cluster's 2, a has 2, b has 1; start Ray with more there (`ray start --num-cpus`)"
    )
    assert granted.short(layout, "GPU", {"GPU": 4.0, "CPU": 3.0}) == "it takes 4 CPUs, and other programs leave 3"
    assert granted.short(layout, "GPU", {"CPU": 3.0}) == "it takes 4 GPUs, and other programs leave 0"


def test_a_long_list_of_nodes_is_cut_in_the_sentence():
    found = granted.refusal([8] * 200, "GPU", [node(f"node-{number}") for number in range(100)])
    assert "node-7 and 92 more" in found
    assert "node-8" not in found


def test_all_differing_versions_are_named_in_one_sentence():
    here = {"Python": "3.11", "jax": "0.10.2", "vllm": "0.32.0+cpu", "libra_jax": "aaaa"}
    alike = node("a", Python="3.11", jax="0.10.2", vllm="0.32.0+cu129", libra_jax="aaaa")
    trains_only = node("b", Python="3.11", jax="0.10.2", libra_jax="aaaa")
    assert granted.differences(here, [alike, trains_only]) == ""
    older = [node(name, Python="3.11", jax="0.9.1", libra_jax="aaaa") for name in ("c", "d")]
    without = node("e", Python="3.12", jax="0.10.2")
    assert granted.differences(here, [alike, *older, without]) == (
        "the run's hosts differ from the one it was started on: Python is 3.12 on e (3.11 here); jax is 0.9.1 on c, d "
        "(0.10.2 here); libra_jax is missing on e (aaaa here); install the same on all of them"
    )


def test_a_worker_gets_the_ids_that_its_host_was_given():
    shared = granted.GrantedNode("id", "node-1", "10.0.0.1", {}, ("4", "5", "6", "7"))
    assert granted.accelerator_ids(shared, "0,1") == "4,5"
    assert granted.accelerator_ids(shared, "3") == "7"
    with pytest.raises(LibraError, match=r"node-1 has 4 accelerators for the run, and one of its workers .* number 4"):
        granted.accelerator_ids(shared, "3,4")


def test_what_was_granted_is_told_in_a_line_and_whole_to_programs():
    layout = hosts.layout(
        config_lib.RunConfig(
            trainer=config_lib.TrainerConfig(data=4, processes=2, rows_per_micro_batch=4),
            rollout=config_lib.RolloutConfig(tensor_parallel=(1,)),
            cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=2),
        )
    )
    found = granted.Granted(layout, tuple(node(name, jax="0.10.2", ray="2.60.0") for name in "abc"), "GPU")
    assert found.sentence() == (
        "Ray placed the run on 3 hosts: a, b to train (2 GPUs each); c to roll out (1 GPU each). "
        "jax 0.10.2, ray 2.60.0."
    )
    assert [(host["node"], host["role"], host["GPU"], host["instances"]) for host in found.record()] == [
        ("a", "training", 2, []),
        ("b", "training", 2, []),
        ("c", "rollout", 1, [0]),
    ]
