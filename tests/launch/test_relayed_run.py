"""A whole run whose engines are on other hosts than its trainer: weights cross, and are those that are trained."""

import collections
import json

import pytest
import real_runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.multiprocess]

STEPS = 3


@pytest.mark.drill
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_engines_on_other_hosts_sample_what_the_trainer_scores(tmp_path):
    workdir = tmp_path / "run"
    done = real_runs.run("relayed_run.py", workdir, str(STEPS), actors=7)
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_hosts(done.stdout)
    for step in _steps(workdir, STEPS):
        assert step["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert step["mismatch/kl"] < 1e-6
        assert step["grad_norm"] > 0
    for host in (2, 3):
        copies = _copies(workdir, host, STEPS)
        assert len({copy["bytes"] for copy in copies}) == 1
        assert copies[0]["bytes"] > 1_000_000  # and each as many, so that nothing crossed twice


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_engines_on_other_hosts_load_what_the_trainer_staged(tmp_path):
    workdir, steps, every = tmp_path / "run", 4, 3
    done = real_runs.run("relayed_run.py", workdir, str(steps), str(every), actors=7)
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_hosts(done.stdout)
    # An engine whose bytes had another checksum than the trainer's would have been lost.
    assert "was lost" not in done.stdout
    assert "did not come" not in done.stdout
    taken = _steps(workdir, steps)
    whole = {round(step["sync/sent_bytes"] / step["sync/sent_share"]) for step in taken}
    assert len(whole) == 1
    for step in taken:
        if step["policy_version"] % every:
            assert 0 < step["sync/sent_share"] < 0.2, taken
        else:
            assert step["sync/sent_share"] == 1
        assert step["grad_norm"] > 0
        # The rounding of bfloat16, and no more: the engine samples with weights that it has loaded.
        assert step["mismatch/kl"] < 1e-3
        assert step["mismatch/ratio_max"] < 1.2
    for host in (2, 3):
        # The first version and that of the full sync come whole, the others as differences.
        sizes = [copy["bytes"] for copy in _copies(workdir, host, steps)]
        assert sizes[0] > 500_000  # half of what float32 has
        assert sizes[0] == sizes[every] > 5 * max(size for version, size in enumerate(sizes) if version % every)


def _assert_hosts(printed):
    told = [json.loads(line) for line in printed.splitlines() if line.startswith('{"actor"')]
    told = [item for item in told if item["host"] is not None]  # where rewards are computed does not matter
    assert {item["actor"]: item["host"] for item in told} == {
        "trainer.0": 0,
        "trainer.1": 1,
        "rollout-0": 2,
        "rollout-1": 3,
        "relay-0": 0,
        "relay-2": 2,
        "relay-3": 3,
    }
    nodes = {item["host"]: {other["node"] for other in told if other["host"] == item["host"]} for item in told}
    assert len(set.union(*nodes.values())) == len(nodes) == 4
    assert all(len(of_host) == 1 for of_host in nodes.values())


def _steps(workdir, count):
    """The run's steps, whose rollouts came from every version."""
    taken = [step for step in real_runs.lines(workdir / "metrics.jsonl") if "loss" in step]
    assert [step["step"] for step in taken] == list(range(1, count + 1))
    served = [record["policy_version"] for record in real_runs.lines(workdir / "trace.jsonl")]
    assert set(served) == set(range(count))
    return taken


def _copies(workdir, host, steps):
    """The copies of versions that came to a host, each version once."""
    events = json.loads((workdir / "timeline.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    copies = [event["args"] for event in events if event["name"] == f"copy to host {host}"]
    assert [copy["policy_version"] for copy in copies] == list(range(steps + 1))
    return copies


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [1, 1_000], ids=["whole chunks", "differences"])
def test_a_replica_on_another_host_trains_with_its_relays_copy_and_killed_relays_cost_nothing_trained(tmp_path, every):
    workdir, steps = tmp_path / "run", 20
    done = real_runs.run("relayed_hybrid_run.py", workdir, str(steps), str(every), actors=6)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed relay-1 between two versions" in done.stdout
    assert "killed relay-2 on the way" in done.stdout
    before, _, after = done.stdout.partition("killed relay-1 on the way while its engine serves")
    assert "Engine rollout-0 was lost" not in before
    assert "Engine rollout-0 was lost" in after
    assert "The relay of host 2 is dropped, and made again when it is needed" in done.stdout

    taken = [step for step in real_runs.lines(workdir / "metrics.jsonl") if "loss" in step]
    assert [step["step"] for step in taken] == list(range(1, steps + 1))
    sent = [step["sync/sent_share"] for step in taken if "sync/sent_share" in step]
    assert (max(sent[-5:]) < 0.2) if every > 1 else (set(sent) == {1.0}), sent
    # Sums of other parameters than those that were published would be refused by their digest.
    assert sum(step.get("shares/micro_batches", 0) for step in taken) > 0
    assert sum(step.get("shares/refused", 0) for step in taken) == 0
    trained = collections.Counter(record["trajectory_id"] for record in real_runs.lines(workdir / "trace.jsonl"))
    assert set(trained.values()) == {1}
    assert len(trained) == steps * 4 * 2
