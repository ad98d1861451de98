"""How a run is laid out over hosts: nothing that talks over fast links is torn apart, and nothing is placed twice."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import hosts


def run(
    each: int,
    *,
    data: int = 1,
    tensor: int = 1,
    context: int = 1,
    processes: int = 1,
    degrees: tuple[int, ...] = (1,),
):
    return config_lib.RunConfig(
        trainer=config_lib.TrainerConfig(
            data=data, tensor=tensor, context=context, processes=processes, rows_per_micro_batch=data
        ),
        rollout=config_lib.RolloutConfig(tensor_parallel=degrees),
        cluster=config_lib.ClusterConfig(backend="ray", accelerators_per_host=each),
    )


def test_a_trainer_of_two_processes_and_two_engines_take_four_hosts_of_one_accelerator():
    found = hosts.layout(run(1, data=2, processes=2, degrees=(1, 1)))
    assert [(host.role, host.processes, host.instances) for host in found.hosts] == [
        ("training", (0,), ()),
        ("training", (1,), ()),
        ("rollout", (), (0,)),
        ("rollout", (), (1,)),
    ]


def test_wide_instances_are_placed_first_and_narrow_ones_fill_what_is_left_of_their_hosts():
    found = hosts.layout(run(8, data=8, degrees=(1, 4, 2, 8)))
    assert [place.host for place in found.instances] == [2, 2, 2, 1]
    assert [place.devices for place in found.instances] == [(6,), (0, 1, 2, 3), (4, 5), tuple(range(8))]


def test_a_run_without_a_size_of_hosts_is_not_laid_out():
    assert hosts.layout(config_lib.RunConfig()) is None


@hypothesis.given(
    each=strategies.sampled_from([1, 2, 4, 8]),
    data=strategies.sampled_from([1, 2, 4, 8]),
    tensor=strategies.sampled_from([1, 2, 4]),
    processes=strategies.sampled_from([1, 2, 4, 8]),
    degrees=strategies.lists(strategies.sampled_from([1, 2, 4, 8]), min_size=1, max_size=12).map(tuple),
)
def test_every_worker_is_on_one_host_no_accelerator_has_two_and_roles_share_no_host(
    each, data, tensor, processes, degrees
):
    hypothesis.assume(data * tensor % processes == 0)
    hypothesis.assume(max(data * tensor // processes, tensor, *degrees) <= each)  # else it is refused, as below
    found = hosts.layout(run(each, data=data, tensor=tensor, processes=processes, degrees=degrees))
    places = (*found.processes, *found.instances)
    taken = [(place.host, device) for place in places for device in place.devices]
    assert len(set(taken)) == len(taken) == data * tensor + sum(degrees)
    assert all(0 <= device < each for _, device in taken)
    training = {place.host for place in found.processes}
    assert training == set(range(len(training)))  # next to each other, first
    assert training.isdisjoint(place.host for place in found.instances)
    assert [host.number for host in found.hosts] == list(range(len(found.hosts)))
    assert sum(host.accelerators for host in found.hosts) == len(taken)
    for group in zip(*[iter(taken[: data * tensor])] * tensor, strict=True):
        assert len({host for host, _ in group}) == 1  # the devices that split a layer
    for number, degree in enumerate(degrees):
        first = data * tensor + sum(degrees[:number])
        assert found.place(range(first, first + degree)) == found.instances[number]


def test_a_worker_over_two_hosts_has_no_place():
    found = hosts.layout(run(1, data=2, processes=2))
    with pytest.raises(protocols.LibraError, match="accelerators 0, 1 of the run are not on one host"):
        found.place((0, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": 4, "processes": 1},
            r"trainer\.processes: each of 1 would have 4 devices .* a host has 2 .* 2 or more",
        ),
        ({"tensor": 4, "processes": 2}, r"trainer\.tensor: the 4 devices that split a layer .* a host has 2"),
        ({"context": 4, "processes": 2}, r"trainer\.context: the 4 devices that split .* a row .* a host has 2"),
        ({"degrees": (1, 4)}, r"rollout\.tensor_parallel: instance 1 has 4 accelerators.*a host has 2"),
    ],
)
def test_what_does_not_fit_a_host_is_refused_by_field(settings, message):
    with pytest.raises(protocols.ConfigError, match=message):
        hosts.layout(run(2, **settings))


def test_a_layout_needs_ray():
    with pytest.raises(protocols.ConfigError, match=r"cluster\.accelerators_per_host: .* set cluster\.backend to ray"):
        config_lib.RunConfig(cluster=config_lib.ClusterConfig(accelerators_per_host=8))
