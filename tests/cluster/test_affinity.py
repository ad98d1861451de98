"""Workers with GPUs keep to the cores near those. The library that knows them is a stand-in: no GPU is needed."""

from __future__ import annotations

import os
import sys
import types

import pytest

from libra_jax.cluster import ray_host


class NVMLError(Exception):
    pass


def library(cores: dict[str, set[int]], fail: str = "") -> types.ModuleType:
    """As pynvml, for GPUs "0", "1", ... and the cores near them, on a machine of 128."""
    module = types.ModuleType("pynvml")

    def affinity_of(handle, words, scope):
        if fail == "affinity":
            raise NVMLError
        assert (words, scope) == (2, 0)
        return [sum(1 << core % 64 for core in cores[handle] if core // 64 == word) for word in range(words)]

    def init():
        if fail == "init":
            raise NVMLError

    module.NVMLError, module.NVML_AFFINITY_SCOPE_NODE = NVMLError, 0
    module.nvmlInit, module.nvmlShutdown = init, lambda: None
    module.nvmlDeviceGetHandleByIndex = str
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid.removeprefix("GPU-")
    module.nvmlDeviceGetCpuAffinityWithinScope = affinity_of
    return module


@pytest.fixture
def machine(monkeypatch):
    """Two NUMA nodes of 64 cores, the first GPU on one and the others on the other; core 127 is not ours."""

    def make(fail: str = "") -> None:
        cores = {"0": set(range(64)), "1": set(range(64, 128)), "2": set(range(64, 128))}
        monkeypatch.setitem(sys.modules, "pynvml", library(cores, fail))
        monkeypatch.setattr(os, "cpu_count", lambda: 128)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(127)))

    make()
    return make


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", range(64)), ("1,2", range(64, 127)), ("GPU-1", range(64, 127)), ("0,1", ()), ("", ())],
)
def test_cores_are_those_of_the_numa_nodes_of_the_gpus(machine, visible, expected):
    assert ray_host.cores_near(visible) == tuple(expected)


@pytest.mark.parametrize("fail", ["init", "affinity"])
def test_a_driver_that_does_not_tell_leaves_all_cores(machine, fail):
    machine(fail)
    assert ray_host.cores_near("0") == ()


def test_without_the_library_all_cores_are_left(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ray_host.cores_near("0") == ()
