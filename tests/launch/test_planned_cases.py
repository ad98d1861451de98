"""What launch/plan.py plans: one place says each thing, and a field that it does not read is refused by name."""

import dataclasses

from support import overrides

import hypothesis
import pytest
from hypothesis import strategies as st

from configs import published, simulate
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import planned
from libra_jax.cluster import hosts
from libra_jax.planning.search import plans
from libra_jax.simulator import scripts, settings

PAIR = scripts.LogNormal.fitted(4000, 7000)


def values(**changes):
    config = simulate.get_config("search")
    config.steps = 1
    return {**config_lib.to_dict(config), **changes}


def test_flags_name_machine_model_and_lengths_of_a_simulated_run():
    asked = planned.PlanRequest(
        hardware="h100", model="Qwen3-8B", accelerators=16, lengths=scripts.RequestedLengths(PAIR)
    )
    case = planned.case(values(), asked)
    assert (case.name, case.model.sheet.name, case.devices) == ("Qwen3-8B", "h100", 16)
    assert case.lengths.generated_mean == pytest.approx(4000, rel=0.01)
    assert case.run.rollout.max_context > case.lengths.context_max
    assert case.run.trainer.row_tokens == case.run.rollout.max_context, "rows are no longer than attempts ask for"
    written = case.as_json()
    assert written["model"] == "Qwen3-8B"
    assert written["lengths"]["source"] == "search, with --generated_tokens"
    slots = [written["slots"][degree] for degree in ("1", "2", "4", "8")]
    assert slots == sorted(slots)
    assert slots[-1] == planned.MOST_SLOTS, "slots are what the cache holds, not those of the config's machine"


@pytest.mark.parametrize("name", [*plans.FIELDS, "trainer.row_tokens", "rollout.slots", "scheduler.policy"])
def test_a_field_that_a_plan_decides_is_refused_beside_it(name):
    if name not in plans.FIELDS:
        overrides.refuse_planned({name}, "plan.json")
        return
    with pytest.raises(protocols.ConfigError, match=rf"--config\.{name}: the plan decides it; .* --plan=plan\.json"):
        overrides.refuse_planned({"steps", name}, "plan.json")


def test_the_fields_that_a_plan_decides_are_those_that_it_changes():
    plan = plans.of_values(
        {
            "data": 2,
            "fsdp": 2,
            "tensor": 2,
            "context": 2,
            "rollout": [
                {"tensor_parallel": degree, "count": 1, "max_remaining_tokens": bound}
                for degree, bound in ((2, 9), (4, 99))
            ],
        }
    )
    run = config_lib.to_dict(config_lib.RunConfig())
    applied = plans.applied(run, plan)
    changed = {
        f"{group}.{name}"
        for group in ("trainer", "rollout", "scheduler")
        for name in run[group]
        if run[group][name] != applied[group][name]
    }
    kept = {"trainer.rows_per_micro_batch", "trainer.processes", "rollout.slots_by_instance"}  # fitted, not replaced
    assert changed - kept == {name for name in plans.FIELDS if not name.startswith("simulation.")}


def test_a_model_may_be_named_by_its_hugging_face_id():
    case = planned.case(values(), planned.PlanRequest(hardware="h100", model="Qwen/Qwen3-8B", accelerators=16))
    assert case.as_json()["model"] == "Qwen3-8B"
    other = planned.PlanRequest(hardware="h100", model="Someone/Qwen3-8B", accelerators=16)
    with pytest.raises(protocols.ConfigError, match="did you mean 'Qwen3-8B'"):
        planned.case(values(), other)


def test_a_preset_of_its_shape_stands_for_a_model_that_is_not_here():
    config = config_lib.to_dict(published.get_config("search-30b-h100"))
    case = planned.case(config, planned.PlanRequest(workload="search"))
    assert (case.name, case.model.sheet.name, case.devices) == ("Qwen3-30B-A3B", "h100", 64)
    config["model"]["path"] = "nowhere/at/all"  # no id of the Hugging Face hub
    for given in ({"model.path"}, set()):
        asked = planned.PlanRequest(workload="search", overrides=frozenset(given))
        if given:  # the preset is the config's, of the model that the command line replaced
            with pytest.raises(protocols.DataError, match="nowhere/at/all: no such model directory"):
                planned.case(config, asked)
        else:
            assert planned.case(config, asked).name == "Qwen3-30B-A3B"


def test_one_entry_gives_the_slots_of_all_instances():
    config = values()
    config["simulation"]["slots"] = (24,)
    slots = planned.case(config, planned.PlanRequest(overrides=frozenset({"simulation.slots"}))).slots
    assert set(slots) == {24}
    assert len(slots) == len(config["rollout"]["tensor_parallel"])


def real(**trainer):
    """Values of a real run of Qwen3-8B, whose rows hold its longest context."""
    config = config_lib.to_dict(config_lib.RunConfig())
    config["model"].update(preset="Qwen3-8B", remat="full")
    config["rollout"].update(max_context=16_384, max_tokens=4_096)
    config["trainer"].update(platform="cuda", row_tokens=16_384, **trainer)
    config["coordinator"].update(groups_per_step=16, group_size=4)
    config["steps"] = 2
    return config


def test_rollouts_end_where_the_context_of_the_run_is_full():
    asked = planned.PlanRequest(
        hardware="h200", accelerators=16, workload="search", lengths=scripts.RequestedLengths(6_000.0)
    )
    case = planned.case(real(), asked)
    assert 0.05 < case.work.cut < 0.5
    longest = max(script.context_tokens for script in case.work.scripts)
    assert longest == 16_384, "as a run's longest context"
    case.searched()
    short = dataclasses.replace(asked, lengths=scripts.RequestedLengths(500.0))
    assert planned.case(real(), short).work.cut == 0.0


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=6),
    st.integers(1, 60),
    st.integers(2, 200),
)
def test_a_cut_script_is_what_fits_into_the_context(turns, prompt, room):
    script = scripts.Script(prompt, tuple(protocols.Turn(tokens, "t", "success", paid) for tokens, paid in turns))
    # Written out token by token: "g" is generated, "p" is everything else.
    dialogue = "p" * prompt + "".join("g" * tokens + "p" * paid for tokens, paid in turns[:-1]) + "g" * turns[-1][0]
    result = scripts.cut(script, room)
    if len(dialogue) <= room:
        assert result is script
        return
    assert result.limit == "max_context"
    assert result.context_tokens <= room
    assert result.generated_tokens == max(1, dialogue[:room].count("g"))


@pytest.mark.parametrize(("per_host", "accelerators"), [(8, 16), (8, 24), (8, 40), (4, 16), (6, 18)])
def test_a_plan_of_whole_hosts_is_laid_out_on_as_many(per_host, accelerators):
    """A run gives each host one role, and no process of the trainer spans two hosts."""
    config = real()
    config["cluster"].update(accelerators_per_host=per_host)  # without cluster.backend=ray, which launchers set
    asked = planned.PlanRequest(
        hardware="h200", accelerators=accelerators, workload="search", lengths=scripts.RequestedLengths(3_000.0)
    )
    plan = planned.case(config, asked).searched().best(accelerators).plan
    config["cluster"].update(backend="ray")
    run = config_lib.parse(config_lib.RunConfig, plans.applied(config, plan))
    layout = hosts.layout(run)
    assert len(layout.hosts) <= accelerators // per_host
    assert plan.rollout_devices > per_host * (len(layout.of_role("rollout")) - 1), "no host of these idles"


def test_a_published_model_is_planned_without_the_hub():
    config = real()
    config["model"].update(preset=config_lib.ModelConfig().preset, path="Qwen/Qwen3-8B")
    case = planned.case(config, planned.PlanRequest(hardware="h100", accelerators=16, workload="search"))
    assert case.name == "Qwen3-8B"


def test_a_config_for_gpus_is_not_planned_for_this_cpu():
    with pytest.raises(protocols.ConfigError, match=r"planner\.hardware: 'cpu' is not what trainer.platform=cuda runs"):
        planned.case(real(), planned.PlanRequest(accelerators=16, workload="search"))


def test_flags_name_machine_model_and_lengths_of_a_real_run():
    config = config_lib.to_dict(config_lib.RunConfig())
    config["rollout"]["max_context"] = config["trainer"]["row_tokens"] = 65_536
    asked = planned.PlanRequest(
        hardware="h200", model="Qwen3-4B", accelerators=8, lengths=scripts.RequestedLengths(PAIR)
    )
    case = planned.case(config, asked)
    assert (case.name, case.model.sheet.name) == ("Qwen3-4B", "h200")
    assert "1 turn" in str(case.lengths)
    with pytest.raises(protocols.ConfigError, match="--generated_tokens: a mean alone scales"):
        planned.case(config, planned.PlanRequest(lengths=scripts.RequestedLengths(4000.0)))
    with pytest.raises(protocols.ConfigError, match="--trace: the config of a real run has no workload"):
        planned.case(config, planned.PlanRequest())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accelerators": 1}, "--accelerators: 1 cannot both train and roll out"),
        ({"accelerators": 10**12}, "--accelerators: 1,000,000,000,000 are more .* at most 1,000,000"),
        ({"trace": "a", "workload": "swe"}, "--workload: --trace says what rollouts are like"),
        ({"trace": "a", "lengths": scripts.RequestedLengths(turns=3)}, "--trace: has lengths of its own"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(protocols.ConfigError, match=message):
        planned.PlanRequest(**arguments)


def test_a_flag_and_the_field_that_says_the_same_are_refused_together():
    asked = planned.PlanRequest(model="Qwen3-8B", overrides=frozenset(["simulation.model"]))
    with pytest.raises(protocols.ConfigError, match=r"--model: --config\.simulation\.model says the same"):
        planned.case(values(), asked)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("planner.hardware", "config.simulation.hardware counts"),
        ("model.preset", "config.simulation.model counts"),
        ("model.path", "config.simulation.model counts"),
        ("trainer.tensor", "config.simulation.train_mesh counts"),
        ("optimizer.learning_rate", "leave it out"),
    ],
)
def test_a_field_that_no_plan_reads_is_refused_with_the_one_that_counts(name, counts):
    read = ["simulation.model", "simulation.coefficients.memory_share", "workload.shape", "rollout.max_context"]
    with pytest.raises(protocols.ConfigError, match=rf"--config\.{name}: launch/plan\.py does not read it; {counts}"):
        overrides.refuse_unread([*read, name], script="plan.py", read=planned.OF_SIMULATION, instead=settings.COUNTS)
    overrides.refuse_unread(read, script="plan.py", read=planned.OF_SIMULATION, instead=settings.COUNTS)


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [("planner", "hardware", "h100"), ("model", "preset", "Qwen3-8B"), ("model", "path", "x")],
)
def test_a_simulated_run_that_names_its_machine_elsewhere_is_refused(group, field, value):
    named = values()
    named[group][field] = value
    with pytest.raises(protocols.ConfigError, match=rf"config\.{group}\.{field}: a simulated run does not read it"):
        config_lib.parse(settings.SimulatedRun, named)


def test_a_simulated_run_with_a_context_axis_is_refused():
    named = values()
    named["trainer"]["context"] = 2
    with pytest.raises(
        protocols.ConfigError, match=r"config\.trainer\.context: simulated training has no context axis"
    ):
        config_lib.parse(settings.SimulatedRun, named)


def test_what_a_plan_is_said_to_read_are_fields_of_the_config():
    for run, fields in ((settings.SimulatedRun(), planned.OF_SIMULATION), (config_lib.RunConfig(), planned.OF_RUN)):
        for name in fields:
            value = run
            for part in name.split("."):
                value = getattr(value, part)
    for name in (*settings.IGNORED, *settings.COUNTS.values()):
        value = settings.SimulatedRun()
        for part in name.split("."):
            value = getattr(value, part)


def test_a_step_of_more_trajectories_than_any_has_is_refused_at_once():
    huge = values()
    huge["coordinator"]["group_size"] = 10**12
    with pytest.raises(protocols.ConfigError, match=r"config\.coordinator\.group_size: .* at most 1,000,000"):
        planned.case(huge, planned.PlanRequest(lengths=scripts.RequestedLengths(PAIR)))
