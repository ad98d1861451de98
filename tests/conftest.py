"""Eight CPU devices for every test of the process, set before JAX is first imported; who shares a worker."""

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ONE_WORKER = ("cluster", "launch", "rollout")
"""Folders whose tests share a Ray cluster, or start engines that would crowd each other out of two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file run on one worker (pytest-xdist), so that they share what its fixtures made."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder in ONE_WORKER else item.path.stem))
