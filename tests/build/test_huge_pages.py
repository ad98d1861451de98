"""The variable with which malloc asks for huge pages, and the second start of a command that trains by itself."""

import json
import os
import subprocess
import sys

import pytest

from libra_jax import config as config_lib
from libra_jax.build import huge_pages

TRAINER = config_lib.TrainerConfig(platform="cpu")

PROGRAM = """
import json, os, pathlib, sys
from libra_jax import config as config_lib
from libra_jax.build import huge_pages
backend, kernel = sys.argv[1:]
cluster = config_lib.ClusterConfig(backend=backend)
run = config_lib.RunConfig(trainer=config_lib.TrainerConfig(platform="cpu"), cluster=cluster)
print(os.getpid())
huge_pages.restart(run, pathlib.Path(kernel))
print(json.dumps([os.getpid(), os.environ.get("GLIBC_TUNABLES")]))
"""


@pytest.fixture(autouse=True)
def without_the_variable(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)


def test_a_trainer_on_cpus_asks_for_huge_pages():
    assert huge_pages.environment(TRAINER) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.mark.parametrize("changed", [{"platform": "cuda"}, {"platform": "auto"}, {"huge_pages": False}])
def test_a_trainer_elsewhere_or_switched_off_does_not(changed):
    assert huge_pages.environment(config_lib.TrainerConfig(**{"platform": "cpu", **changed})) == {}


def test_the_users_own_tunables_stay(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert huge_pages.environment(TRAINER) == {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert huge_pages.environment(TRAINER) == {}


@pytest.mark.parametrize(
    ("backend", "kernel", "starts", "value"),
    [
        ("inprocess", "always [madvise] never", 2, "glibc.malloc.hugetlb=1"),
        ("inprocess", "[always] madvise never", 1, None),  # they come without being asked for
        ("inprocess", "always madvise [never]", 1, None),
        ("ray", "always [madvise] never", 1, None),  # the trainer runs in another process
    ],
)
def test_a_command_starts_itself_again_once_where_it_helps(backend, kernel, starts, value, tmp_path):
    (tmp_path / "enabled").write_text(kernel)
    command = [sys.executable, "-c", PROGRAM, backend, str(tmp_path / "enabled")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *processes, last = result.stdout.splitlines()
    assert len(processes) == starts
    assert json.loads(last) == [int(processes[0]), value]


def test_a_kernel_without_the_choice_is_left_alone(tmp_path):
    before = dict(os.environ)
    huge_pages.restart(config_lib.RunConfig(trainer=TRAINER), tmp_path / "missing")
    assert dict(os.environ) == before
