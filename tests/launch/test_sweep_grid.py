"""The runs of a sweep: every config with every combination of values, and a sentence for what cannot be read."""

from support import sweeps

import pytest

from libra_jax.protocols import ConfigError

QUICK = "configs/quickstart.py"


def test_several_sweeps_make_a_product_and_overrides_reach_every_run():
    tried = ["optimizer.learning_rate=1e-4,3e-4", "config.coordinator.group_size=2,4"]
    made = sweeps.cells(QUICK, None, ["--config.task.max_turns=2"], tried)
    assert [cell.name for cell in made] == [
        f"{QUICK} learning_rate={rate}, group_size={size}" for rate in ("1e-4", "3e-4") for size in ("2", "4")
    ]
    assert made[1].settings == (
        "--config.task.max_turns=2",
        "--config.optimizer.learning_rate=1e-4",
        "--config.coordinator.group_size=4",
    )


def test_commas_in_brackets_and_quotation_marks_belong_to_the_value():
    (one, two) = sweeps.cells(QUICK, None, [], ["rollout.tensor_parallel=(1,1),(2,)"])
    assert [cell.settings[0] for cell in (one, two)] == [
        "--config.rollout.tensor_parallel=(1,1)",
        "--config.rollout.tensor_parallel=(2,)",
    ]
    assert len(sweeps.cells(QUICK, None, [], ["name='a,b',c"])) == 2


def test_fields_of_one_name_are_told_apart_by_their_group():
    (cell,) = sweeps.cells(QUICK, None, [], ["evaluation.every=1", "checkpoint.every=2"])
    assert cell.name.endswith("evaluation.every=1, checkpoint.every=2")


def test_settings_of_the_runs_are_taken_from_the_command_line():
    ours, theirs = sweeps.taken(["sweep.py", "--seeds=0", "--config.steps=5", "-config.planner.shadow", "--configs=a"])
    assert ours == ["sweep.py", "--seeds=0", "--configs=a"]
    assert theirs == ["--config.steps=5", "--config.planner.shadow"]


@pytest.mark.parametrize(
    ("given", "tried", "message"),
    [
        ([], ["learning_rate"], "--sweep: 'learning_rate' names no field and values"),
        ([], ["optimizer.learning_rate="], "names no field and values"),
        ([], ["rollout.tensor_parallel=(1,2"], "opens a bracket"),
        ([], ["seed=0,1"], "--sweep=seed: say seeds by --seeds"),
        ([], ["steps=1,2"], "--sweep=steps: .* see --steps"),
        (["--config.seed=3"], [], r"--config\.seed: say seeds by --seeds"),
        ([], ["a.b=1", "a.b=2"], r"--sweep=a\.b: is given twice"),
        (["--config.a.b=3"], ["a.b=1"], r"--sweep=a\.b: is given twice"),
        ([], ["a.b=" + ",".join(map(str, range(1001)))], "--sweep: 1,001 combinations are more than 1,000"),
    ],
)
def test_what_cannot_be_swept_is_a_sentence(given, tried, message):
    with pytest.raises(ConfigError, match=message):
        sweeps.cells(QUICK, None, given, tried)
