"""launch/sweep.py: every config under every seed once, one table, and sentences for what cannot be run."""

import json
import re

import pytest
import scripts

from libra_jax.planning.costs import costs
from libra_jax.simulator import comparison, world

ABLATION = ("--of=configs/ablation.py", "--steps=1", "--jobs=1")


def test_a_sweep_runs_each_config_and_seed_once_and_goes_on_where_it_was_stopped(tmp_path):
    output = tmp_path / "sweep"
    arguments = (*ABLATION, "--configs=static-search,colocated-search", f"--output={output}")
    first = scripts.run("sweep.py", *arguments, seconds=200)
    assert first.returncode == 0, first.stderr
    assert "2 runs, of which 0 are done already" in first.stderr
    results = json.loads((output / "sweep.json").read_text())
    assert list(results) == ["static-search", "colocated-search"]
    for entry in (entries[0] for entries in results.values()):
        assert entry["tokens_per_second"] > 0
        assert 0 < entry["bound_seconds"] < entry["step_seconds"]["mean"]
        assert entry["lost_trajectories"] == entry["duplicated_trajectories"] == 0
        assert entry["moves"] == entry["looks"] == 0
    assert results["colocated-search"][0]["staleness_max"] == 0
    assert (output / "sweep.svg").stat().st_size > 1000

    more = scripts.run("sweep.py", *arguments[:-1], "--seeds=0,1", arguments[-1], seconds=200)
    assert more.returncode == 0, more.stderr
    assert "4 runs, of which 2 are done already" in more.stderr
    assert "+- is the sample standard deviation over the seeds" in more.stdout
    again = json.loads((output / "sweep.json").read_text())
    assert [entry["seed"] for entry in again["static-search"]] == [0, 1]
    assert again["static-search"][0] == results["static-search"][0]


def test_each_coefficient_is_moved_both_ways_and_the_order_told(tmp_path):
    names = ("static-search", "colocated-search")
    few = "--config.coordinator.groups_per_step=16"
    small = ("--steps=1", "--jobs=2", f"--output={tmp_path}", f"--configs={','.join(names)}", few, ABLATION[0])
    result = scripts.run("sweep.py", *small, "--sensitivity", seconds=280)
    assert result.returncode == 0, result.stderr
    found = re.findall(
        r"^(\w+ = \S+): (order kept|swaps .*) \(static-search 1.00, colocated-search (\S+)\)$", result.stdout, re.M
    )
    left_out = {line.partition(", ")[2].partition(":")[0] for line in result.stderr.splitlines() if "left out" in line}
    count = sum(1 for _ in world.SimulationConfig().moved(comparison.MOVE))
    assert len(found) + len(left_out) == count > 30
    assert f"step_overhead = {1.3 * costs.Coefficients().step_overhead:.3g}" in [name for name, _, _ in found]
    ratios = {float(ratio) for _, _, ratio in found}
    assert len(ratios) > 3
    entries = json.loads((tmp_path / "sweep.json").read_text())
    base = entries[names[1]][0]["tokens_per_second"] / entries[names[0]][0]["tokens_per_second"]
    for _, verdict, ratio in found:
        if abs(float(ratio) - 1.0) > 0.01:
            assert (verdict == "order kept") == ((float(ratio) > 1.0) == (base > 1.0))


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ((), ("--configs: name at least one",)),
        (("--configs=statik", "--of=configs/ablation.py"), ("configs/ablation.py has static", "'statik'")),
        (("--configs=static",), ("static: no such config file", "--of=FILE")),
        (
            ("--configs=configs/simulate.py,configs/quickstart.py",),
            ("configs/simulate.py is a simulated run and configs/quickstart.py a real one",),
        ),
        (("--configs=configs/quickstart.py", "--sweep=optimizer.lr=1"), ("optimizer.lr: no such field",)),
        (("--configs=configs/simulate.py", "--config.planner.hardware=h100"), ("config.simulation.hardware counts",)),
        (("--configs=configs/simulate.py", "--seeds=a"), ("--seeds: 'a' is no seed",)),
        (("--configs=configs/simulate.py", "--jobs=two"), ("error: --jobs: 'two' is not a whole number",)),
    ],
)
def test_what_cannot_be_swept_is_refused_in_a_sentence(arguments, fragments, tmp_path):
    result = scripts.run_forked("sweep.py", *arguments, f"--output={tmp_path}")
    scripts.assert_one_sentence(result, *fragments)


def test_a_dry_run_leaves_no_folder_behind(tmp_path):
    result = scripts.run_forked(
        "sweep.py", "--configs=configs/quickstart.py", "--dry_run", f"--output={tmp_path / 'runs'}"
    )
    assert result.returncode == 0, result.stderr
    assert "launch/train.py --config=configs/quickstart.py --config.seed=0" in result.stdout
    assert not list(tmp_path.iterdir())
