"""`algorithm.replay`: stored successes for groups without any, within their bounds, also after a kill at any moment."""

from __future__ import annotations

import collections
import json
import random

import coordinator_doubles as doubles
import hypothesis
import prompt_doubles
import pytest
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import prompts, replay

SUCCESS = {"replay": "success", "replay_max_staleness": 40}


def make_config(staleness=0, steps=4, **changes):
    return doubles.make_config(
        **{
            "steps": steps,
            "coordinator": {"max_staleness": staleness, "groups_per_step": 2, "group_size": 2},
            "algorithm": SUCCESS,
            **changes,
        }
    )


def make_group(number, prompt, rewards, version, tokens=3, finish="answered"):
    members = []
    for sample, reward in enumerate(rewards):
        made = protocols.Trajectory(f"{prompt}-{number}/{sample}", prompt, reward=9.0, environment_reward=reward)
        made.append_text([1], protocols.TokenSource.PROMPT)
        made.append_sampled(protocols.TokenDelta((7,) * tokens, (-0.5,) * tokens, (version,) * tokens))
        made.finish = finish
        members.append(made)
    return protocols.Group(number, protocols.Task(f"{prompt}-{number}", {}, repeats=prompt), version, members)


class Model:
    """What is stored, by brute force over all groups that were ever added."""

    def __init__(self, config):
        self.config, self.added = config, []

    def stored(self, group):
        """Keys of the successes that may be in store when a group is begun, the oldest first."""
        settings, limits = self.config.algorithm, self.config.coordinator
        step = group.group_id // limits.groups_per_step
        before = (step - limits.max_staleness) * limits.groups_per_step
        kept: list[protocols.Group] = []
        for one in sorted((one for one in self.added if one.group_id < before), key=lambda one: one.group_id):
            kept.append(one)
            same = [other for other in kept if other.task.prompt == one.task.prompt]
            kept = [other for other in kept if other not in same[: -settings.replay_per_prompt]]
        while sum(len(one.trajectories[0].token_ids) for one in kept) > settings.replay_tokens:
            kept.pop(0)
        return kept

    def offers(self, group):
        settings, last = self.config.algorithm, group.dispatch_version + self.config.coordinator.max_staleness
        return {
            f"{one.trajectories[0].trajectory_id}-replayed{group.group_id}"
            for one in self.stored(group)
            if one.task.prompt == group.task.prompt and last - one.dispatch_version <= settings.replay_max_staleness
        }


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    staleness=st.integers(0, 2),
    per_prompt=st.integers(1, 2),
    tokens=st.integers(1, 30),
    groups=st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(1, 9)), max_size=24),
    order=st.randoms(use_true_random=False),
)
def test_what_is_stored_is_bounded_and_survives_checkpoints(staleness, per_prompt, tokens, groups, order):
    algorithm = {**SUCCESS, "replay_per_prompt": per_prompt, "replay_tokens": tokens}
    config = make_config(staleness, steps=40, algorithm=algorithm)
    replays, model, begun = replay.SuccessReplay(config), Model(config), []
    for number, (prompt, solved, length) in enumerate(groups):
        group = make_group(number, prompt, [float(solved)], number // 2, length)
        replays.choose(group)
        offered = {group.replay.trajectory_id} if group.replay else set()
        assert offered <= model.offers(group)
        assert bool(offered) == bool(model.offers(group))
        assert replays.metrics()["replay/stored_tokens"] <= tokens
        begun.append(group)
        # Groups end in any order, but none later than the staleness bound has them trained.
        due = (number // 2 - staleness) * 2 + (number + 1) % 2 * 2
        for one in [one for one in begun if one.group_id < due or order.random() < 0.4]:
            begun.remove(one)
            replays.add(one)
            model.added += [one] * (one.trajectories[0].environment_reward == 1.0)
        if order.random() < 0.3:
            kept = replay.SuccessReplay(config)
            kept.restore(json.loads(json.dumps(replays.state())))
            assert (kept.state(), kept.metrics()) == (replays.state(), replays.metrics())
            replays = kept


def offered(group, *earlier, **algorithm):
    replays = replay.SuccessReplay(make_config(steps=60, algorithm={**SUCCESS, **algorithm}))
    for one in earlier:
        replays.add(one)
    replays.choose(group)
    return replays, group.replay


def test_a_replayed_rollout_keeps_its_tokens_probabilities_and_versions():
    earlier = make_group(0, "a", [0.0, 1.0, 1.0], 0)
    replays, found = offered(make_group(40, "a", [0.0, 0.0], 20), earlier)
    source = earlier.trajectories[1]
    assert (found.token_ids, found.log_probs, found.policy_versions) == (
        source.token_ids,
        source.log_probs,
        source.policy_versions,
    )
    assert (found.trajectory_id, found.replayed, found.reward) == ("a-0/1-replayed40", True, 9.0)
    assert replays.metrics() == {"replay/stored": 1, "replay/stored_tokens": 4}


def test_only_a_group_without_a_success_of_its_own_takes_it():
    for rewards, finish, size in (([0.0, 0.0], "answered", 3), ([0.0, 1.0], "answered", 2), ([0.0], "max_seconds", 1)):
        replays, _ = offered(group := make_group(40, "a", rewards, 20, finish=finish), make_group(0, "a", [1.0], 0))
        replays.join(group)
        assert len(group.trajectories) == size
        assert len(group.rollouts) == len(rewards)
        assert group.replay is None


def test_no_replay_is_staler_than_its_bound_at_the_last_step_that_may_train_it():
    earlier = make_group(0, "a", [1.0], 3)
    assert offered(make_group(40, "a", [0.0], 43), earlier)[1] is not None
    replays, found = offered(make_group(40, "a", [0.0], 44), earlier)
    assert found is None
    assert replays.metrics()["replay/stored"] == 0, "no later group can take it either"


def test_what_limits_cut_off_is_no_success():
    assert offered(make_group(40, "a", [0.0], 20), make_group(0, "a", [1.0], 0, finish="max_seconds"))[1] is None


@pytest.mark.parametrize(
    ("order", "budget", "staleness"),
    [("sequential", "uniform", 0), ("sequential", "uniform", 2), ("success", "knapsack", 1)],
)
def test_killed_at_any_moment_a_run_replays_the_same_as_never_killed(tmp_path, order, budget, staleness):
    config = doubles.make_config(
        steps=14,
        task={"order": order, "tool_seconds": 5.0},
        algorithm={**SUCCESS, "budget": budget},
        coordinator={"group_size": 2, "max_staleness": staleness},
        checkpoint={"every": 1},
    )
    whole, moments = prompt_doubles.make_bench(config, tmp_path / "whole"), random.Random(f"{order}/{staleness}")
    assert prompt_doubles.run_for(whole, 1e6)
    seconds = sum(scalars["step/seconds"] for _, scalars in whole.recorder.steps)
    bench = prompt_doubles.run_killed(config, tmp_path / "killed", seconds, moments)
    replays = {prompt: name for prompt, (name, _) in bench.trained["replays"].items()}
    assert replays == {prompt: name for prompt, (name, _) in whole.trained["replays"].items()}
    assert len(replays) > 3
    # No prompt is trained twice: a replayed rollout comes from an earlier visit of the prompt, under a name of its own.
    assert bench.trained["sizes"] == whole.trained["sizes"]
    assert len(bench.trained["prompts"]) == len(set(bench.trained["prompts"])) == 3 * 14
    assert len(set(replays.values())) == len(replays)
    for prompt, name in replays.items():
        assert name.split("-pass")[0] == prompt.split("-pass")[0]
        assert not name.startswith(f"{prompt}/")


def test_replayed_rollouts_count_nowhere_but_in_their_own_metrics(tmp_path):
    config = doubles.make_config(steps=14, algorithm=SUCCESS, coordinator={"group_size": 2})
    bench = prompt_doubles.make_bench(config, tmp_path)
    bench.run()
    plain = prompt_doubles.make_bench(doubles.make_config(steps=14, coordinator={"group_size": 2}), tmp_path / "plain")
    plain.run()
    counted = collections.Counter()
    for (step, scalars), (_, wanted) in zip(bench.recorder.steps, plain.recorder.steps, strict=True):
        counted["rollouts"] += scalars["replay/rollouts"]
        if scalars["replay/rollouts"]:
            assert 0 < scalars["replay/staleness_max"] <= step
            assert scalars["replay/groups"] == scalars["replay/rollouts"] / 3
            assert scalars["replay/tokens"] > 0
        same = {name for name in wanted if not name.startswith("coordinator/seconds")}
        assert {name: scalars[name] for name in same} == {name: wanted[name] for name in same}
    assert counted["rollouts"] == len(bench.trained["replays"]) > 3
    assert bench.recorder.trajectories == plain.recorder.trajectories
    assert max(staleness for _, staleness in bench.trained["replays"].values()) <= 14


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"replay": "succes"}, r"algorithm\.replay: .*did you mean 'success'"),
        ({"replay": "none", "replay_tokens": 5}, r"replay_tokens: 5 has no effect with algorithm\.replay=none"),
        ({"replay_per_prompt": 0}, r"replay_per_prompt: must be positive, not 0"),
        ({"replay_max_staleness": 2}, r"replay_max_staleness: 2 must be above coordinator\.max_staleness = 2"),
        ({"objective": "decoupled"}, r"algorithm\.replay: an older policy sampled .*objective=decoupled; set"),
        ({"advantage": "gae"}, r"algorithm\.replay: .*advantage=gae compares none"),
        ({"entropy_share": 0.0}, r"entropy_share: must lie in \(0, 1\], not 0"),
    ],
)
def test_replays_that_cannot_help_are_refused_by_name(changes, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        config_lib.RunConfig(
            algorithm=config_lib.AlgorithmConfig(**{**SUCCESS, **changes}),
            coordinator=config_lib.CoordinatorConfig(max_staleness=2),
            critic=config_lib.CriticConfig(enabled=changes.get("advantage") == "gae"),
        )


def test_prompts_that_never_come_again_or_too_late_are_refused(tmp_path):
    with pytest.raises(protocols.ConfigError, match=r"algorithm\.replay: success goes by past rollouts .*take none"):
        prompts.check(make_config(), doubles.Tasks())
    late = {**SUCCESS, "replay_max_staleness": 3}
    with pytest.raises(protocols.ConfigError, match=r"comes again after 3\.5 steps, and 3 is less"):
        prompts.check(make_config(algorithm=late), prompt_doubles.Passes())
    prompts.check(make_config(algorithm=late, task={"order": "success"}), prompt_doubles.Passes())
