"""Comparing policies: the table's arithmetic, the order, and moved coefficients."""

import dataclasses
import re
import statistics

import pytest
import simulator_doubles as doubles
from matplotlib import figure

from libra_jax import protocols
from libra_jax.planning.costs import costs
from libra_jax.simulator import comparison, report, settings, workloads


def entry(policy: str, seed: int, seconds: float, accuracy: float | None = 0.5) -> dict:
    return {
        "policy": policy,
        "seed": seed,
        "tokens_per_second": 100.0,
        "step_seconds": {"mean": seconds, "p50": seconds, "p90": seconds, "p99": seconds},
        "utilisation": {"train": 0.5, "rollout": 0.75},
        "migrated_token_fraction": 0.08,
        "one_shot_routing_accuracy": accuracy,
        "kv_recompute_token_fraction": 0.2,
        "staleness_max": seed,
        "lost_trajectories": seed,
        "duplicated_trajectories": 0,
        "replaced_trajectories": 0,
        "trained_trajectories": 64,
        "trained_tokens_mean": 100.0,
        "wall_seconds": 1.0,
    }


ENTRIES = [entry("slow", 0, 30.0, None), entry("slow", 1, 50.0, None), entry("fast", 0, 9.0), entry("fast", 1, 11.0)]


def test_the_table_shows_means_over_seeds_their_spread_and_their_distance_from_the_bound():
    header, slow, fast, bound, *legend = report.table(ENTRIES, 8.0).splitlines()
    cells = dict(zip(header.replace("step s", "step").replace("x bound", "bound").split(), fast.split(), strict=True))
    assert (cells["step"], cells["+-"], cells["bound"]) == ("10.0", f"{statistics.stdev((9, 11)):.1f}", "1.25")
    assert (cells["moved"], cells["one-shot"], cells["stale"], cells["lost"]) == ("8.0%", "50.0%", "1", "1")
    assert slow.split()[1] == "40.0"
    assert " - " in slow  # no tool was ever called
    assert "8.0 s a step" in bound
    assert all(f"{name}: " in " ".join(legend) for name in ("moved", "one-shot", "again", "stale", "twice"))


def test_the_order_is_by_mean_step_time_and_swaps_are_named():
    assert list(report.mean_step_seconds(ENTRIES)) == ["fast", "slow"]
    assert comparison.swapped(["a", "b", "c"], ["b", "a", "c"]) == [("a", "b")]
    assert comparison.swapped(["a", "b", "c"], ["c", "b", "a"]) == [("a", "b"), ("a", "c"), ("b", "c")]


def test_a_picture_is_written_as_svg_and_as_png(tmp_path):
    for name, start in (("out.svg", b"<?xml"), ("out.png", b"\x89PNG")):
        report.write_picture(ENTRIES, 8.0, tmp_path / name, "two policies")
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_legend_of_the_picture_lies_over_no_bar(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda picture, *_, **__: saved.append(picture))
    report.write_picture(ENTRIES, 8.0, tmp_path / "out.svg", "two policies")
    saved[0].draw_without_rendering()
    [axes] = saved[0].axes
    legend = axes.get_legend() or saved[0].legends[0]
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def small_run() -> settings.SimulatedRun:
    long = {"max_context": 131_072, "max_tokens": 65_536}
    config = doubles.run_config(steps=2, rollout=long, trainer={"row_tokens": 131_072})
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return settings.SimulatedRun(
        **values, simulation=doubles.SIMULATION, workload=workloads.WorkloadConfig(shape="search")
    )


def test_the_same_seed_gives_the_same_entry_and_another_seed_another():
    run = comparison.prepare(small_run(), ["cmlfq"])
    first, second, other = (comparison.entry(dataclasses.replace(run, seed=seed)) for seed in (3, 3, 4))
    assert first | {"wall_seconds": 0} == second | {"wall_seconds": 0}
    assert first["step_seconds"] != other["step_seconds"]


def test_each_coefficient_is_moved_down_and_up_by_three_tenths_and_reported():
    lines: list[str] = []
    run = comparison.prepare(small_run(), ["round_robin", "oracle"])
    base, moves = comparison.sensitivity(run, ["round_robin", "oracle"], [0], jobs=1, progress=lines.append)
    # Nothing of 0, and nothing of host memory, which the run does not use.
    given = dataclasses.asdict(costs.Coefficients()).items()
    names = [name for name, value in given if value and not name.startswith("host_")]
    assert [move.coefficient for move in moves] == [name for name in names for _ in range(2)]
    overhead = [move.value for move in moves if move.coefficient == "step_overhead"]
    assert overhead == [0.7 * costs.Coefficients().step_overhead, 1.3 * costs.Coefficients().step_overhead]
    assert all(move.value <= 1 for move in moves if move.coefficient in costs.SHARES)
    slower, faster = (move.step_seconds["oracle"] for move in moves if move.coefficient == "memory_share")
    assert faster < report.mean_step_seconds(base.entries)["oracle"] < slower
    assert sum(line.startswith("memory_share") for line in lines) == 2


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("stiky", "scheduler.policy: 'stiky' is not one of"),
        ("sticky:admision=cache", "'admision=cache' changes no field; write FIELD=VALUE"),
        ("sticky:admission", "'admission' changes no field"),
        ("sticky:policy=cmlfq", "'policy=cmlfq' changes no field"),
        ("sticky:quantum=9", "'quantum=9' changes no field"),
        ("sticky:threshold=-1", "scheduler.arguments.threshold: must not be negative, not -1"),
        ("sticky:admission=cach", "scheduler.admission: 'cach' is not one of"),
        ("sticky:rollout.nothing.more=3", "changes no field"),
    ],
)
def test_a_policy_with_a_wrong_change_is_refused_by_name(policy, said):
    with pytest.raises(protocols.ConfigError, match=re.escape(said)):
        comparison.with_policy(small_run(), policy)


def test_a_policy_may_change_fields_of_its_own_and_of_other_groups():
    changes = "admission=cache+coordinator.groups_per_step=7+ageing_seconds=5.5+threshold=0.3"
    made = comparison.with_policy(small_run(), f"sticky:{changes}")
    assert (made.scheduler.policy, made.scheduler.admission, made.scheduler.ageing_seconds) == ("sticky", "cache", 5.5)
    assert (made.coordinator.groups_per_step, made.scheduler.arguments) == (7, {"threshold": 0.3})
    assert comparison.with_policy(made, "sticky:segments=related").scheduler.arguments == {"threshold": 0.3}
    assert comparison.with_policy(made, "cmlfq").scheduler.arguments == {}
