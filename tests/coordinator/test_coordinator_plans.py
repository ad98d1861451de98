"""Plans in a run: instances end and begin by them, requests go on, and nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import coordinator_doubles as doubles
import mortal_trainers
import pytest

from libra_jax import protocols
from libra_jax.planning import planner, replanning

BEGIN = protocols.Plan(1, 1, 1, (protocols.PlannedBucket(1, 2, 100),))
WIDE = protocols.Plan(1, 1, 1, (protocols.PlannedBucket(1, 1, 6), protocols.PlannedBucket(2, 1, 100)))
REBUCKETED = protocols.Plan(1, 1, 1, (protocols.PlannedBucket(1, 2, 50),))
GROWN = protocols.Plan(2, 1, 1, (protocols.PlannedBucket(1, 1, 100),))


class Scripted:
    """Says what to do after which step."""

    def __init__(self, plans: Mapping[int, protocols.Plan]) -> None:
        self.plan = BEGIN
        self.calibrated = False
        self.plans = plans
        self.measured: list[planner.ObservedStep] = []
        self.fails: tuple[int, ...] = ()

    def after(
        self,
        step: int,
        measured: planner.ObservedStep,
        trained: Sequence[protocols.Trajectory],
        *,
        may_move: bool = True,
    ) -> Any:
        self.measured.append(measured)
        assert len(trained) == 6
        if step in self.fails:
            raise protocols.ConfigError("the model fits nowhere")
        if step not in self.plans or not may_move:
            return None, {"plan/step_seconds": 1.0}
        self.plan = self.plans[step]
        return replanning.Decision(step, "told to", self.plan, 2.0, 1.0, 0.1, True, "it pays"), {}

    def refuse(self, plan: protocols.Plan) -> None:
        self.plan = plan

    def snapshot(self) -> dict[str, Any]:
        return {"plan": dataclasses.asdict(self.plan)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        kept = snapshot["plan"]
        self.plan = protocols.Plan(**{**kept, "rollout": tuple(protocols.PlannedBucket(**b) for b in kept["rollout"])})


class Makes:
    """Makes engines of any degree."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.made: list[tuple[int, int, list[str]]] = []
        self.refuses = ""

    def __call__(self, number: int, degree: int, others: Sequence[protocols.ActorSpec]) -> protocols.ActorSpec:
        if self.refuses:
            raise protocols.LibraError(self.refuses)
        self.made.append((number, degree, [other.name for other in others]))
        (spec,) = doubles.engine_specs(self.config, 1)
        name = f"engine-{number}"
        return dataclasses.replace(
            spec, name=name, arguments={**spec.arguments, "name": name, "tensor_parallel": degree, "seed": number}
        )


def make_bench(tmp_path, plans, **changes):
    config = doubles.make_config(steps=6, coordinator={"max_staleness": 1}, **changes)
    planner, makes = Scripted(plans), Makes(config)
    bench = doubles.Bench(config, tmp_path, planner=planner, make_engine=makes)
    return bench, planner, makes


def check_whole(bench) -> None:
    """Six steps of three groups, each prompt once."""
    trained = bench.trained
    assert sorted(trained["prompts"]) == sorted(set(trained["prompts"]))
    assert len(trained["prompts"]) == 6 * 3


def test_a_plan_ends_and_begins_instances_and_nothing_is_lost(tmp_path):
    bench, planner, makes = make_bench(tmp_path, {2: WIDE})
    bench.run()
    check_whole(bench)
    assert makes.made == [(2, 2, ["engine-0", "trainer"])]
    assert bench.cluster.spawned == ["trainer", "engine-0", "engine-1", "engine-2"]
    served = collections.Counter(
        span[0] for span in bench.recorder.spans if span[1] == "generate" and span[4]["tokens"]
    )
    assert served["engine-2"] > 0
    assert ("engine-1", "ended by a plan") in bench.recorder.statuses
    (decision,) = bench.recorder.decisions
    assert (decision["step"], decision["moved"], decision["reason"]) == (2, True, "it pays")
    assert any("moves" in note for note in bench.recorder.notes)
    steps = [scalars for _, scalars in bench.recorder.steps]
    assert [step["staleness/max"] <= 1 for step in steps] == [True] * 6
    assert any("plan/step_seconds" in step for step in steps)
    assert all(measured.step > 0 and measured.slots > 0 for measured in planner.measured)


def test_a_plan_whose_instance_finds_no_place_is_given_up_before_anybody_gives_devices_up(tmp_path):
    bench, planner, makes = make_bench(tmp_path, {2: WIDE})
    makes.refuses = "2 devices are free, too few of them on one host"
    bench.run()
    check_whole(bench)
    assert bench.cluster.spawned == ["trainer", "engine-0", "engine-1"]
    assert planner.plan == BEGIN
    assert any("The plan is aborted: 2 devices are free" in note for note in bench.recorder.notes)


def test_other_bounds_alone_restart_nothing(tmp_path):
    bench, _, makes = make_bench(tmp_path, {2: REBUCKETED})
    bench.run()
    check_whole(bench)
    assert not makes.made
    assert bench.cluster.spawned == ["trainer", "engine-0", "engine-1"]


def test_every_instance_may_be_replaced_at_once(tmp_path):
    only_wide = protocols.Plan(1, 1, 1, (protocols.PlannedBucket(2, 1, 100),))
    bench, _, makes = make_bench(tmp_path, {1: only_wide, 4: BEGIN})
    bench.run()
    check_whole(bench)
    assert [(number, degree) for number, degree, _ in makes.made] == [(2, 2), (3, 1), (4, 1)]


@pytest.fixture
def trainers(monkeypatch):
    """Every trainer that is made."""
    made: list[Any] = []
    plain = doubles.make_trainer

    def make(**arguments: Any) -> Any:
        made.append(plain(**arguments))
        return made[-1]

    monkeypatch.setattr(doubles, "make_trainer", make)
    return made


def test_a_trainer_that_grows_waits_for_the_devices_and_takes_over_between_two_steps(tmp_path, trainers):
    bench, _, _ = make_bench(tmp_path, {2: GROWN})
    bench.run()
    check_whole(bench)
    ((version, sizes),) = trainers[0].meshes
    assert sizes == protocols.MeshSizes(2, 1, 1)
    assert version > 2
    (transition,) = bench.recorder.transitions
    assert (transition["worker"], transition["from"], transition["to"]) == (
        "trainer",
        "data 1 x fsdp 1 x tensor 1",
        "data 2 x fsdp 1 x tensor 1",
    )
    assert (transition["outcome"], transition["reason"], transition["bytes"]) == ("done", "a plan", 50)
    ended = [at for at, (name, text) in enumerate(bench.recorder.statuses) if text == "ended by a plan"]
    moving = [at for at, (name, text) in enumerate(bench.recorder.statuses) if text.startswith("moving to data 2")]
    assert len(ended) == len(moving) == 1
    assert ended < moving


def test_a_mesh_that_is_refused_leaves_the_run_and_the_planner_as_they_were(tmp_path, trainers):
    refused = dataclasses.replace(BEGIN, data=6)
    bench, planner, makes = make_bench(tmp_path, {2: refused})
    bench.run()
    check_whole(bench)
    assert planner.plan == BEGIN
    assert not trainers[0].meshes
    assert not makes.made
    (transition,) = bench.recorder.transitions
    assert (transition["outcome"], transition["why"]) == ("failed", "a mesh of six cannot be")
    assert any("stays on its mesh" in note and "a mesh of six cannot be" in note for note in bench.recorder.notes)


def test_a_resumed_run_goes_on_to_the_mesh_of_the_plan_in_force(tmp_path, trainers):
    bench, _, _ = make_bench(tmp_path, {2: GROWN}, checkpoint={"every": 1})
    bench.coordinator._config = dataclasses.replace(bench.coordinator._config, steps=5)
    bench.run()
    assert trainers[0].meshes
    again, planner, _ = make_bench(tmp_path, {}, checkpoint={"every": 1})
    again.run()
    check_whole(again)
    assert planner.plan == GROWN
    assert [sizes for _, sizes in trainers[1].meshes] == [protocols.MeshSizes(2, 1, 1)]


def test_a_resumed_run_starts_the_instances_of_the_plan_in_force(tmp_path):
    bench, _, _ = make_bench(tmp_path, {2: WIDE}, checkpoint={"every": 1})
    bench.coordinator._config = dataclasses.replace(bench.coordinator._config, steps=4)
    bench.run()
    again, planner, makes = make_bench(tmp_path, {}, checkpoint={"every": 1})
    again.run()
    check_whole(again)
    assert planner.plan == WIDE
    assert [(number, degree) for number, degree, _ in makes.made] == [(0, 1), (1, 2)]


def test_a_lost_instance_is_told_to_the_planner(tmp_path):
    config = doubles.make_config(steps=6)
    planner = Scripted({})
    specs = doubles.engine_specs(config, 2)
    specs[1] = dataclasses.replace(specs[1], arguments={**specs[1].arguments, "fail_after_tokens": 30})
    bench = doubles.Bench(config, tmp_path, specs=specs, planner=planner, make_engine=Makes(config))
    bench.run()
    check_whole(bench)
    assert sum(measured.lost for measured in planner.measured) > 0
    assert any(measured.disturbed for measured in planner.measured)


def test_a_step_in_which_the_trainer_was_made_anew_is_told_to_be_like_no_other(tmp_path):
    fate, planner = mortal_trainers.Fate(mortal_trainers.at(("train_step", 6, "before"))), Scripted({})
    further = {"planner": planner, "make_engine": Makes(doubles.make_config())}
    bench = mortal_trainers.bench(tmp_path, fate, further, steps=9)
    bench.run()
    assert fate.lives == 2
    assert [measured.disturbed for measured in planner.measured] == [step == 6 for step in range(1, 9)]


def test_a_planner_that_cannot_plan_leaves_the_run_alone(tmp_path):
    bench, planner, _ = make_bench(tmp_path, {})
    planner.fails = (2, 3, 4)
    bench.run()
    check_whole(bench)
    said = [note for note in bench.recorder.notes if "the model fits nowhere" in note]
    assert said == ["No plan could be made, and everything stays as it is: the model fits nowhere."]


def test_the_last_step_decides_nothing(tmp_path):
    bench, planner, makes = make_bench(tmp_path, {6: WIDE})
    bench.run()
    check_whole(bench)
    assert len(planner.measured) == 5
    assert not makes.made


def slow_starts(bench, seconds: float) -> None:
    """Engines take so long until they serve."""
    spawn = bench.cluster.spawn

    async def delayed(spec: protocols.ActorSpec) -> Any:
        if spec.name.startswith("engine-") and int(spec.name[-1]) > 1:
            await asyncio.sleep(seconds)
        return await spawn(spec)

    bench.cluster.spawn = delayed


def test_while_instances_start_training_goes_on_and_nothing_further_is_decided(tmp_path):
    bench, planner, makes = make_bench(tmp_path, {2: WIDE, 3: BEGIN}, deadlines={"engine_start": 100.0})
    slow_starts(bench, 1.0)
    bench.run()
    check_whole(bench)
    assert makes.made == [(2, 2, ["engine-0", "trainer"])], "the plan of step 3 came while the move was under way"
    disturbed = [measured.disturbed for measured in planner.measured]
    assert disturbed[2]
    assert not disturbed[0]


def test_an_instance_lost_while_others_start_comes_back_and_nothing_is_lost(tmp_path):
    config = doubles.make_config(steps=6, coordinator={"max_staleness": 1}, deadlines={"engine_start": 100.0})
    specs = doubles.engine_specs(config, 2)
    specs[0] = dataclasses.replace(specs[0], arguments={**specs[0].arguments, "fail_after_tokens": 60})
    bench = doubles.Bench(config, tmp_path, specs=specs, planner=Scripted({2: WIDE}), make_engine=Makes(config))
    slow_starts(bench, 0.5)
    bench.run()
    check_whole(bench)


def test_stopped_in_the_middle_of_a_move_it_ends_and_goes_on_with_the_new_plan(tmp_path):
    bench, planner, _ = make_bench(tmp_path, {2: WIDE}, checkpoint={"every": 1}, deadlines={"engine_start": 100.0})
    slow_starts(bench, 50.0)
    ask = planner.after

    def stop_soon(step: int, *arguments: Any, **further: Any) -> Any:
        if step == 3:
            bench.coordinator.request_stop()
        return ask(step, *arguments, **further)

    planner.after = stop_soon
    assert bench.run().stopped
    again, planner, makes = make_bench(tmp_path, {}, checkpoint={"every": 1})
    again.run()
    check_whole(again)
    assert planner.plan == WIDE
    assert [(number, degree) for number, degree, _ in makes.made] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("shadow", [False, True])
def test_an_instance_that_is_lost_for_good_is_replaced_at_the_next_look_but_by_no_shadow(tmp_path, shadow):
    config = doubles.make_config(steps=6, rollout={"restarts": 0}, planner={"shadow": shadow})
    specs = doubles.engine_specs(config, 2)
    specs[1] = dataclasses.replace(specs[1], arguments={**specs[1].arguments, "fail_after_tokens": 30})
    makes = Makes(config)
    bench = doubles.Bench(config, tmp_path, specs=specs, planner=Scripted({4: BEGIN}), make_engine=makes)
    bench.run()
    check_whole(bench)
    assert [(number, degree) for number, degree, _ in makes.made] == ([] if shadow else [(2, 1)])


def test_a_loss_is_told_until_the_planner_may_act_on_it(tmp_path):
    config = doubles.make_config(steps=6, coordinator={"max_staleness": 1}, deadlines={"engine_start": 100.0})
    planner = Scripted({})
    specs = doubles.engine_specs(config, 2)
    specs[1] = dataclasses.replace(specs[1], arguments={**specs[1].arguments, "fail_after_tokens": 30})
    bench = doubles.Bench(config, tmp_path, specs=specs, planner=planner, make_engine=Makes(config))
    spawn, spawned = bench.cluster.spawn, []

    async def slowly_again(spec: protocols.ActorSpec) -> Any:
        spawned.append(spec.name)
        if spawned.count(spec.name) > 1:
            await asyncio.sleep(1.0)
        return await spawn(spec)

    bench.cluster.spawn = slowly_again
    told: list[tuple[int, bool]] = []
    ask = planner.after

    def note(step: int, measured: planner.ObservedStep, *arguments: Any, **further: Any) -> Any:
        told.append((measured.lost, further["may_move"]))
        return ask(step, measured, *arguments, **further)

    planner.after = note
    bench.run()
    check_whole(bench)
    assert (1, False) in told, "it was lost while it could not be acted on"
    first = told.index((1, False))
    acted = [may for lost, may in told[first:] if lost]
    assert acted.count(True) <= 1
    assert all(lost for lost, may in told[first:] if not may)


@pytest.mark.parametrize("staleness", [0, 1])
def test_waits_for_slots_are_measured(tmp_path, staleness):
    config = doubles.make_config(steps=6, rollout={"slots": 1}, coordinator={"max_staleness": staleness})
    planner = Scripted({})
    specs = doubles.engine_specs(config, 2, tokens_per_second=20.0)
    bench = doubles.Bench(config, tmp_path, specs=specs, planner=planner, make_engine=Makes(config))
    bench.run()
    assert max(measured.waiting for measured in planner.measured) > 1.0
