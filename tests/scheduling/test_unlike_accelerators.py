"""Where requests go among accelerators of which one decodes faster and the other reads faster."""

from __future__ import annotations

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning.costs import hardware
from libra_jax.scheduling import costs, registry

DECODES = protocols.Instance("decodes", 2, 8, accelerator="h20")
READS = protocols.Instance("reads", 2, 8, accelerator="h800")
SPEEDS = {name: costs.AcceleratorSpeed(*speed) for name, speed in hardware.speeds(("h800", "h20"), "").items()}


def taught(policy: str, payload: int) -> protocols.Scheduler:
    """It has seen forty rollouts of which each return has this many tokens, for fifty generated ones."""
    config = config_lib.SchedulerConfig(policy=policy, max_remaining_tokens=(10_000,))
    scheduler = registry.create(config, costs=costs.LinearCosts(speeds=SPEEDS), kinds=(DECODES.kind, READS.kind))
    scheduler.on_instance_change([DECODES, READS], 0.0)
    for index in range(40):
        name, context = f"past-{index}", 100
        scheduler.on_arrival(protocols.RequestInfo(name, name, index, context), 1.0)
        for turn in range(1, 6):
            scheduler.on_tool_call(name, 50 * turn, 2.0)
            context += 50 + payload
            scheduler.on_tool_return(name, protocols.CausalState("bash", payload, "success"), context, 3.0)
        scheduler.on_finish(name, 300, 4.0)
    return scheduler


def first_place(scheduler: protocols.Scheduler) -> str:
    (placement,) = scheduler.on_arrival(protocols.RequestInfo("new", "new", 99, 100), 5.0)
    return placement.instance


@pytest.mark.parametrize(("payload", "instance"), [(0, "decodes"), (2_000, "reads")])
def test_work_that_reads_much_goes_where_reading_is_fast_and_other_work_where_decoding_is(payload, instance):
    assert first_place(taught("cmlfq", payload)) == instance


def test_a_request_that_reads_more_than_others_moves_to_where_reading_is_fast():
    scheduler = taught("cmlfq", 100)
    assert first_place(scheduler) == "decodes"
    scheduler.on_tool_call("new", 50, 6.0)
    (placement,) = scheduler.on_tool_return("new", protocols.CausalState("bash", 30_000, "success"), 30_150, 7.0)
    assert placement.instance == "reads"


def test_speeds_are_those_of_the_sheets_relative_to_the_first():
    assert SPEEDS["h800"] == (1.0, 1.0)
    assert SPEEDS["h20"] == pytest.approx((4.0 / 3.35, 148 / 989))
    made = costs.LinearCosts(config_lib.CostConfig(), speeds=SPEEDS)
    fast, slow = made.decode_seconds(DECODES, 4, 500, 100), made.decode_seconds(READS, 4, 500, 100)
    assert slow / fast == pytest.approx(4.0 / 3.35)
    assert made.read_seconds(DECODES, 700) / made.read_seconds(READS, 700) == pytest.approx(989 / 148)
    assert made.move_seconds("other", DECODES, 700) == pytest.approx(made.read_seconds(DECODES, 700))


def test_an_accelerator_without_a_sheet_is_refused_by_its_field():
    with pytest.raises(protocols.ConfigError, match=r"config\.rollout\.accelerators: 'h21' .* did you mean 'h20'"):
        hardware.speeds(("h800", "h21"), "rollout.accelerators")


def test_accelerators_are_one_for_each_instance_of_a_fixed_layout():
    with pytest.raises(protocols.ConfigError, match=r"rollout\.accelerators: has 1 entries for the 2 instances"):
        config_lib.RolloutConfig(tensor_parallel=(1, 2), accelerators=("h20",))
    rollout = config_lib.RolloutConfig(tensor_parallel=(1, 2), accelerators=("h20", "h800"))
    assert rollout.kinds == ((1, "h20"), (2, "h800"))
    with pytest.raises(protocols.ConfigError, match=r"rollout\.accelerators: is for fixed layouts"):
        config_lib.RunConfig(rollout=rollout, planner=config_lib.PlannerConfig(period=2))
