"""What a scheduler has learnt outlives it, and adds up with what others have."""

from __future__ import annotations

import json

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import registry

INSTANCES = (protocols.Instance("narrow", 1, 64), protocols.Instance("wide", 4, 64))
LEARNING = ("cmlfq", "cmlfq_paper", "heddle")
FAILED = protocols.CausalState("bash", 1_000, "failure")
WORKED = protocols.CausalState("bash", 1_000, "success")


def create(policy: str) -> protocols.Scheduler:
    scheduler = registry.create(config_lib.SchedulerConfig(policy=policy, max_remaining_tokens=(1_000,)))
    scheduler.on_instance_change(INSTANCES, 0.0)
    return scheduler


def serve(scheduler: protocols.Scheduler, name: str, causal: protocols.CausalState, tokens: int) -> None:
    """A request that calls a tool after 10 tokens and ends after `tokens` more."""
    scheduler.on_arrival(protocols.RequestInfo(name, f"prompt-{name}", 0, 100, dispatch_version=0), 0.0)
    scheduler.on_tool_call(name, 10, 1.0)
    scheduler.on_tool_return(name, causal, 200, 2.0)
    scheduler.on_finish(name, 10 + tokens, 3.0)


def kept(scheduler: protocols.Scheduler) -> dict:
    return json.loads(json.dumps(scheduler.snapshot()))


@pytest.mark.parametrize("policy", LEARNING)
def test_what_two_have_learnt_is_together_what_one_learns_from_both(policy):
    first, second, both, joined = (create(policy) for _ in range(4))
    for index in range(20):
        for scheduler in (first, both):
            serve(scheduler, f"a{index}", WORKED, 50)
    for index in range(20):
        for scheduler in (second, both):
            serve(scheduler, f"b{index}", FAILED, 30_000)
    joined.merge(kept(first))
    joined.merge(kept(second))
    trees = {name for name, statistics in kept(both).items() if "nodes" in statistics}
    assert trees
    for name in trees:
        mine, theirs = kept(joined)[name]["nodes"], kept(both)[name]["nodes"]
        assert sorted(sorted(samples) for _, _, samples, *_ in mine) == sorted(
            sorted(samples) for _, _, samples, *_ in theirs
        )


@pytest.mark.parametrize("policy", ["cmlfq", "cmlfq_paper"])
def test_a_decision_rests_on_what_others_have_learnt(policy):
    teacher = create(policy)
    for index in range(20):
        serve(teacher, f"a{index}", WORKED, 50)
        serve(teacher, f"b{index}", FAILED, 30_000)
    taught = create(policy)
    taught.merge(kept(teacher))
    places = {}
    for scheduler in (taught, create(policy)):
        scheduler.on_arrival(protocols.RequestInfo("x", "unseen", 1, 100, dispatch_version=0), 0.0)
        scheduler.on_tool_call("x", 10, 1.0)
        places[scheduler] = [item.instance for item in scheduler.on_tool_return("x", FAILED, 200, 2.0)]
    assert places.pop(taught) == ["wide"]
    if policy == "cmlfq_paper":  # which keeps a request of which it knows nothing where it is
        assert places.popitem()[1] == ["narrow"]


@pytest.mark.parametrize("policy", ["least_loaded", "mlfq"])
def test_a_policy_without_statistics_takes_none(policy):
    scheduler = create(policy)
    scheduler.merge(kept(create("cmlfq")))
    assert scheduler.snapshot() == {}
