"""A run's actors on emulated hosts: where they are, what is refused, what becomes of them when hosts die."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from libra_jax.cluster import emulated
from libra_jax.protocols import LibraError
from libra_jax.utils import scratch

pytestmark = [pytest.mark.ray, pytest.mark.multiprocess, pytest.mark.slow]
HERE = pathlib.Path(__file__).parent


def run(folder: pathlib.Path) -> dict[str, Any]:
    """What `emulated_run.py` saw. Once Ray has read its token, a process keeps to it: so each run is a process."""
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "emulated_run.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("hosts"))


def test_workers_are_on_the_hosts_of_the_layout_each_on_one_that_is_for_what_it_does(seen):
    assert {name: seen["on"][name] for name in ("trainer.0", "trainer.1", "rollout-0", "rollout-1")} == {
        "trainer.0": "host-0",
        "trainer.1": "host-2",
        "rollout-0": "host-1",
        "rollout-1": "host-1",
    }


def test_an_actor_without_a_host_goes_to_a_node_that_the_run_takes_nothing_of(seen):
    assert seen["on"]["reward"] == "host-3"


def test_the_run_is_told_of_its_hosts_and_what_they_have_installed(seen):
    assert seen["sentence"].startswith(
        "Ray placed the run on 3 hosts: host-0, host-2 to train (2 CPUs each); host-1 to roll out (2 CPUs each). Pyth"
    )
    assert [host["node"] for host in seen["record"]] == ["host-0", "host-2", "host-1"]
    assert len({host["address"] for host in seen["record"]}) == 3
    assert all({"Python", "jax", "ray", "libra_jax"} <= host["versions"].keys() for host in seen["record"])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "not_laid_out",
            "config.cluster.accelerators_per_host: is 0, which puts the whole run on one host, and the Ray ",
        ),
        ("too_many", "the run takes 4 hosts (2 CPUs each), and the Ray cluster has 3 (host-"),
        ("too_large", "the run takes 2 hosts (4, 1 CPUs), 5 in all, and of the Ray cluster's 3, host-"),
    ],
)
def test_what_the_cluster_cannot_hold_is_refused_in_a_sentence_within_30_seconds(seen, case, message):
    assert seen[case]["kind"] == "ConfigError"
    assert message in seen[case]["text"]
    assert seen[case]["seconds"] < 30


def test_hosts_that_differ_are_refused_in_a_sentence_once_ray_has_placed_the_run(seen):
    assert seen["differing"]["kind"] == "ConfigError"
    assert "jax is 9.9.9 on host-4 (0.10.2 here); install the same on all of them" in seen["differing"]["text"]


def test_an_actor_whose_host_dies_is_made_anew_on_a_spare_host(seen):
    assert seen["again_on"] == "host-3"
    assert seen["answers"] == 3
    assert seen["told"] == [["host-0", "host-2", "host-1"], ["host-0", "host-2", "host-3"]]


def test_a_spare_host_that_has_other_versions_takes_no_place(seen):
    for sentence in seen["refused_spare"]:
        assert sentence.startswith("host-4 has taken the place of the run's host host-3, but the run's hosts differ ")
        assert "jax is 9.9.9 on host-4" in sentence


def test_an_actor_whose_host_dies_without_a_spare_one_is_given_up_after_its_deadline(seen):
    assert seen["gone"]["kind"] == "DeadlineMissed"
    assert seen["gone"]["text"].startswith("host 2 of the run (host-3) did not answer within 4 s, and no other node")
    assert 3 < seen["gone"]["seconds"] < 19


def test_the_placement_groups_are_gone_when_runs_have_ended(seen):
    assert seen["groups"] == ["REMOVED"] * 5


def test_workers_see_the_gpus_that_their_host_was_given_by_their_ids_there(seen):
    """Of GPUs that Ray is only told of."""
    assert seen["gpus"] == {"trainer": "5,7", "rollout-0": "2", "rollout-1": "3"}


def test_a_host_that_does_not_start_is_an_error_that_says_why(seen):
    assert seen["broken"].startswith("host-5, which Ray emulates, ended: ")


def test_of_hosts_that_are_not_up_in_time_nothing_is_left():
    folders = f"{scratch.RAY_PREFIX}{os.getpid()}-*"
    before = set(pathlib.Path("/tmp").glob(folders))  # other tests of this process may have a Ray of their own
    with pytest.raises(LibraError, match="host-0, which Ray emulates, was not up within 0 s: "):  # noqa: SIM117
        with emulated.EmulatedHosts(1, seconds=0.0):
            pass
    assert set(pathlib.Path("/tmp").glob(folders)) == before


def test_a_host_that_ends_while_it_starts_is_started_once_more(monkeypatch):
    begun = []

    def begin(hosts, deadline):
        begun.append(deadline)
        if len(begun) < ends:
            raise emulated._HostEnded("host-0, which Ray emulates, ended: port taken")
        return hosts

    monkeypatch.setattr(emulated.EmulatedHosts, "_begin", begin)
    ends = 2
    hosts = emulated.EmulatedHosts(1)
    assert hosts.__enter__() is hosts
    assert begun[0] == begun[1], "both have one deadline"
    begun.clear()
    ends = 3
    with pytest.raises(LibraError, match="port taken"):
        emulated.EmulatedHosts(1).__enter__()
