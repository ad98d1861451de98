"""Which device sits where on the mesh; the devices are on paper."""

import types

import jax
import numpy as np
import pytest

from libra_jax.training import state


def gpus(hosts: int, each: int) -> list[types.SimpleNamespace]:
    """In the order in which JAX may list them: by process, and not by id."""
    found = [
        types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", process_index=host, id=host * each + number)
        for host in range(hosts)
        for number in range(each)
    ]
    return found[each:] + found[:each]


def numbers(grid) -> list:
    return np.vectorize(lambda device: device.id)(grid).tolist()


@pytest.mark.parametrize(
    ("hosts", "shape"), [(1, (2, 2, 2, 1)), (2, (2, 4, 2, 1)), (2, (1, 8, 2, 1)), (4, (6, 2, 2, 1)), (4, (2, 4, 1, 1))]
)
def test_the_tensor_axis_stays_inside_a_host_and_data_spans_hosts_first(hosts, shape):
    grid = state.arranged(shape, gpus(hosts, int(np.prod(shape)) // hosts))
    assert grid.shape == shape
    assert sorted(np.ravel(numbers(grid))) == list(range(int(np.prod(shape))))
    process = np.vectorize(lambda device: device.process_index)(grid)
    assert (process == process[:, :, :1]).all()
    assert len(set(process[:, 0, 0, 0].tolist())) == np.gcd(shape[0], hosts)


def test_hosts_that_do_not_divide_keep_the_order_of_the_devices():
    devices = gpus(2, 8)[:12]
    assert state.arranged((3, 4, 1, 1), devices).ravel().tolist() == devices
    assert state.arranged((1, 1, 16, 1), gpus(2, 8)).ravel().tolist() == gpus(2, 8)


def test_cpu_devices_stay_in_order():
    devices = jax.devices()[::-1]
    assert state.arranged((2, 2, 2, 1), devices).ravel().tolist() == devices
