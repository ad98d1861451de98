"""Eight CPU devices for every test of the process, set before JAX is first imported; who shares a worker.

What tests of several rooms share is in `common/`, whose modules they import by name.
"""

import os
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parent / "common"))

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ENGINES = ("cluster", "launch", "rollout")
"""Folders with tests that start engines, whole runs or a Ray cluster: one at a time, or they crowd each other out."""

HEAVY = ("vllm", "ray", "slow", "multiprocess")
"""Marks of those tests."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file run on one worker (pytest-xdist) and share what its fixtures made; all engines on one."""
    for item in items:
        alone = item.path.parent.name in ENGINES and any(map(item.get_closest_marker, HEAVY))
        item.add_marker(pytest.mark.xdist_group("engines" if alone else item.path.stem))
