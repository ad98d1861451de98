"""The trainer through its protocol: warm start, steps, metrics, refusals, publication, resume."""

import dataclasses
import functools
import json
import os
import pathlib
import time

import jax
import numpy as np
import pytest
import torch
import transformers

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.interop import memfd
from libra_jax.models import hf
from libra_jax.training import learner as learner_lib
from libra_jax.training import trainer

GOLDEN = pathlib.Path(__file__).parent / "golden_step.json"


@pytest.fixture(scope="module")
def model_directory(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small"
    hf.save(small.params, small.shape, path)
    return str(path)


@pytest.fixture
def start(small, model_directory, monkeypatch):
    """Makes and starts trainers of the small model, compiled fast; shuts them down in the end."""
    monkeypatch.setattr(learner_lib, "Learner", functools.partial(learner_lib.Learner, compiler_options=small.fast))
    running = []

    def make(**groups) -> trainer.TrainerActor:
        groups.setdefault("steps", 10)
        config = small.config(model={"path": model_directory}, **groups)
        made = trainer.create(config_lib.to_dict(config), workdir="unused")
        running.append(made)
        made.start()
        return made

    yield make
    for made in running:
        made.shutdown()


def _trajectory(group, index, rng, vocabulary, version=0, reward=None):
    trajectory = protocols.Trajectory(trajectory_id=f"p{group}/{index}", prompt_id=f"p{group}")
    trajectory.append_text(rng.integers(0, vocabulary, 3).tolist(), protocols.TokenSource.PROMPT)
    for turn in range(2):
        count = int(rng.integers(2, 6))
        trajectory.append_sampled(
            protocols.TokenDelta(
                token_ids=tuple(rng.integers(0, vocabulary, count).tolist()),
                log_probs=tuple(rng.normal(-np.log(vocabulary), 0.05, count).tolist()),
                policy_versions=(version,) * count,
            )
        )
        if turn == 0:
            trajectory.append_text(rng.integers(0, vocabulary, 2).tolist(), protocols.TokenSource.TOOL)
    trajectory.reward = float(rng.random() < 0.5) if reward is None else reward
    return trajectory


def _batch(small, version=0, seed=0, sampled_by=None):
    rng = np.random.default_rng(seed)
    sampled_by = version if sampled_by is None else sampled_by
    groups = tuple(
        protocols.Group(
            group_id=number,
            task=protocols.Task(f"p{number}", {}),
            dispatch_version=sampled_by,
            trajectories=[_trajectory(number, index, rng, small.vocabulary, sampled_by) for index in range(4)],
        )
        for number in range(3)
    )
    return protocols.TrainBatch(version, groups)


def _params(actor):
    return [np.array(leaf) for leaf in jax.tree.leaves(actor._started().params)]


def test_start_tells_what_it_is_and_a_step_reports_its_metrics(small, start):
    config = config_lib.to_dict(small.config(trainer={"data": 2}))
    actor = trainer.create({**config, "steps": 4}, workdir="unused")
    with pytest.raises(protocols.LibraError, match="call start first"):
        actor.train_step(_batch(small))
    actor = start(trainer={"data": 2})
    metrics = actor.train_step(_batch(small))
    assert "tokens/trained" not in metrics, "the coordinator counts those, in real runs and simulated ones alike"
    assert metrics["compiled_shapes"] == 1
    assert metrics["skipped"] == 0
    assert metrics["learning_rate"] == pytest.approx(1e-3)
    assert 0 < metrics["padding_fraction"] < 1
    assert metrics["entropy"] == pytest.approx(np.log(small.vocabulary), rel=0.05)
    assert metrics["advantage/min"] < 0 < metrics["advantage/max"]
    wanted = {
        "loss",
        "loss/policy",
        "grad_norm",
        "mismatch/kl",
        "mismatch/ratio_max",
        "advantage/mean",
        "advantage/std",
    }
    assert wanted <= metrics.keys()
    assert "offpolicy/kl" not in metrics
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())


def _scored_by_transformers(batch, model_directory):
    """The batch's trajectories, their log-probabilities those of the model, at the small config's temperature."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        with torch.no_grad():
            logits = reference(torch.tensor([trajectory.token_ids])).logits[0] / 0.8
        scores = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(trajectory.token_ids)[1:, None])[:, 0]
        for index in np.flatnonzero(trajectory.loss_mask):
            trajectory.log_probs[index] = float(scores[index - 1])
    return trajectories


def test_mismatch_is_measured_on_the_scoring_versions_tokens_only_against_transformers(small, start, model_directory):
    actor = start()
    batch = _batch(small)
    for trajectory in _scored_by_transformers(batch, model_directory):
        for index in np.flatnonzero(trajectory.loss_mask)[1::3]:
            trajectory.log_probs[index] -= 0.5
            trajectory.policy_versions[index] = -5
    metrics = actor.train_step(batch)
    assert metrics["mismatch/kl"] < 1e-9
    assert metrics["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["offpolicy/kl"] == pytest.approx(np.expm1(0.5) - 0.5, rel=1e-3)


def test_the_mismatch_of_trajectories_that_moved_is_told_apart(small, start, model_directory, request):
    start()  # compiles fast from here on
    config = small.config(model={"path": model_directory})
    rollout = dataclasses.replace(config.rollout, tensor_parallel=(1, 2))
    actor = trainer.create(config_lib.to_dict(dataclasses.replace(config, rollout=rollout)), workdir="unused")
    request.addfinalizer(actor.shutdown)
    actor.start()
    batch = _batch(small)
    stayed, moved, *_ = trajectories = _scored_by_transformers(batch, model_directory)
    for trajectory in trajectories:
        trajectory.metrics["moves"] = 0.0
    stayed.log_probs[4] -= 0.5
    moved.log_probs[4] += 0.25
    moved.metrics["moves"] = 2.0
    metrics = actor.train_step(batch)
    assert metrics["mismatch/moved_log_prob_max"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["mismatch/moved_kl"] == pytest.approx((np.expm1(-0.25) + 0.25) / moved.generated_tokens, rel=1e-3)
    assert metrics["mismatch/ratio_max"] == pytest.approx(np.exp(0.5), rel=1e-3)
    unmoved = actor.train_step(_batch(small, version=1))
    assert "mismatch/kl" in unmoved
    assert not [name for name in unmoved if name.startswith("mismatch/moved")]


def test_without_a_token_of_the_scoring_version_no_mismatch_is_reported(small, start):
    metrics = start().train_step(_batch(small, sampled_by=-5))
    assert not [name for name in metrics if name.startswith("mismatch/")]
    assert metrics["ratio/max"] > 0
    assert metrics["offpolicy/kl"] > 0


def test_warm_start_learns_and_training_begins_with_a_fresh_optimizer(small, start):
    warm = config_lib.WarmStartConfig(steps=5, learning_rate=1e-2)
    actor = start(warm_start=warm, algorithm=config_lib.AlgorithmConfig(kl_coefficient=0.1))
    rng = np.random.default_rng(0)
    sequences = [_trajectory(0, index, rng, small.vocabulary) for index in range(4)]
    losses = [actor.warm_start_step(sequences)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    warmed = _params(actor)
    first = actor.train_step(_batch(small))
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-7)
    assert actor.open_weights(1) > 0
    state = actor._started().state
    assert int(state.step) == 1
    assert max(int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == np.int32) == 1
    for leaf, wanted in zip(jax.tree.leaves(state.reference), warmed, strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    with pytest.raises(protocols.LibraError, match="comes before training"):
        actor.warm_start_step(sequences)


def test_a_restored_trainer_trains_on_exactly_as_the_one_that_saved(small, start, tmp_path):
    first = start()
    first.train_step(_batch(small, 0, seed=0))
    first.save(str(tmp_path / "state"))
    expected = first.train_step(_batch(small, 1, seed=1))
    first.wait_saved()
    second = start()
    assert second.restore(str(tmp_path / "state")) == 1
    assert second.train_step(_batch(small, 1, seed=1)) == expected
    for leaf, wanted in zip(_params(second), _params(first), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


def test_a_saved_state_brings_the_count_of_skipped_steps_along_and_a_snapshot_leaves_the_checkpoints_alone(
    small, start, tmp_path
):
    first = start(trainer={"max_skipped_steps": 2})
    learner = first._started()
    learner.begin(jax.tree.map(lambda leaf: leaf * np.nan, learner.params))
    for version in (0, 1):
        first.train_step(_batch(small, version))
    (tmp_path / "file").write_text("")
    with pytest.raises(protocols.LibraError, match="the checkpoint cannot be written"):
        first.snapshot(str(tmp_path / "file" / "snapshot"))
    first.save(str(tmp_path / "state"))
    snapshot = first.snapshot(str(tmp_path / "snapshot"))
    assert snapshot.policy_version == 2
    assert snapshot.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(learner.state))
    first.wait_saved()
    while not first.snapshot_saved():
        time.sleep(0.01)
    for name in ("state", "snapshot"):
        assert first.is_saved(str(tmp_path / name))
        second = start(trainer={"max_skipped_steps": 2})
        assert second.restore(str(tmp_path / name)) == second.policy_version() == 2
        with pytest.raises(protocols.LibraError, match=r"max_skipped_steps: 3 steps in a row .* not finite"):
            second.train_step(_batch(small, 2))


def test_a_trainer_that_stands_by_compiles_what_another_has_met_and_goes_on_from_its_snapshot(
    small, start, model_directory, request, tmp_path
):
    first = start()
    first.train_step(_batch(small))
    config = small.config(model={"path": model_directory}, trainer={"data": 2, "tensor": 2}, steps=10)
    second = trainer.create(config_lib.to_dict(config), workdir="unused")
    request.addfinalizer(second.shutdown)
    assert second.stand_by().mesh["tensor"] == 2
    assert second.shapes() == []
    second.warm(first.shapes())
    assert second.shapes() == first.shapes()
    with pytest.raises(protocols.LibraError, match="holds no state yet"):
        second.train_step(_batch(small))
    first.snapshot(str(tmp_path / "snapshot"))
    while not first.snapshot_saved():
        time.sleep(0.01)
    assert second.restore(str(tmp_path / "snapshot")) == 1
    metrics, wanted = (actor.train_step(_batch(small, 1)) for actor in (second, first))
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
    assert metrics["compiled_shapes"] == wanted["compiled_shapes"], "nothing was left to compile"


def test_export_writes_what_the_trainer_holds(small, start, tmp_path):
    actor = start()
    actor.train_step(_batch(small))
    actor.export(str(tmp_path / "out"))
    loaded = hf.load(tmp_path / "out", small.shape)
    for leaf, wanted in zip(jax.tree.leaves(loaded), _params(actor), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


def test_a_published_snapshot_has_the_trainers_version_and_all_its_tensors(small, start):
    actor = start()
    actor.train_step(_batch(small))
    with pytest.raises(protocols.LibraError, match="version 0 cannot be published: the trainer holds 1"):
        actor.open_weights(0)
    count = actor.open_weights(1)
    buckets = [actor.stage_weights(1, index) for index in range(count)]
    actor.close_weights(1)
    assert {bucket.policy_version for bucket in buckets} == {1}
    names = [entry.name for bucket in buckets for entry in bucket.entries]
    assert "lm_head.weight" in names
    assert len(names) == len(set(names))


@pytest.mark.parametrize("decoupled", [True, False])
def test_penalty_in_reward_and_decoupled_objective_run_through_the_trainer(small, start, decoupled):
    algorithm = config_lib.AlgorithmConfig(
        advantage="reinforce_plus_plus",
        kl_coefficient=0.1,
        kl_in_reward=True,
        objective="decoupled" if decoupled else "behaviour",
        correction="truncated",
    )
    actor = start(algorithm=algorithm)
    metrics = actor.train_step(_batch(small, 0, sampled_by=-3))
    assert np.isfinite(metrics["loss"])
    assert "loss/kl" not in metrics
    assert metrics["offpolicy/kl"] > 0
    assert (metrics["ratio/max"] == pytest.approx(1.0)) == decoupled


def _poison(field, value):
    def change(trajectory):
        if field == "reward":
            trajectory.reward = value
        else:
            getattr(trajectory, field)[-1] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_poison("reward", float("nan")), "trajectory p1/2: its reward is nan"),
        (_poison("reward", None), "trajectory p1/2: its reward is None"),
        (_poison("log_probs", float("-inf")), "trajectory p1/2: .*log-probability that is not a number"),
        (_poison("token_ids", 10_000), "trajectory p1/2: holds a token id outside the model's vocabulary of 16"),
        (lambda trajectory: trajectory.loss_mask.pop(), "trajectory p1/2: its per-token lists have different lengths"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_the_trajectorys_name(small, start, change, sentence):
    actor = start()
    before = _params(actor)
    batch = _batch(small)
    change(batch.groups[1].trajectories[2])
    with pytest.raises(protocols.DataError, match=sentence):
        actor.train_step(batch)
    actor.train_step(_batch(small))  # the version has not moved and the trainer still works
    assert any((leaf != old).any() for leaf, old in zip(_params(actor), before, strict=True))


def test_batches_of_another_version_or_without_a_trained_token_are_refused(small, start):
    actor = start()
    with pytest.raises(protocols.LibraError, match="for policy version 3 and the trainer holds 0"):
        actor.train_step(_batch(small, 3))
    batch = _batch(small)
    for group in batch.groups:
        for trajectory in group.trajectories:
            trajectory.loss_mask = [False] * len(trajectory.token_ids)
    with pytest.raises(protocols.LibraError, match="no token of the batch's 12 sequences is under the loss mask"):
        actor.train_step(batch)


def test_a_run_whose_steps_stay_not_finite_stops_with_a_sentence(small, start):
    actor = start(trainer={"max_skipped_steps": 2})
    learner = actor._started()
    learner.begin(jax.tree.map(lambda leaf: leaf * np.nan, learner.params))
    assert [actor.train_step(_batch(small, version))["skipped"] for version in (0, 1)] == [1, 1]
    with pytest.raises(protocols.LibraError, match=r"max_skipped_steps: 3 steps in a row .* not finite"):
        actor.train_step(_batch(small, 2))


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"trainer": {"data": 8, "fsdp": 2, "rows_per_micro_batch": 16}}, "needs 16 devices and there are 8"),
        ({"trainer": {"fsdp": 1, "tensor": 3}}, "3 does not divide"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(start, groups, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        start(**groups)


def test_a_pinned_trainer_runs_on_its_cores_and_a_core_that_is_not_there_is_refused(start):
    before = os.sched_getaffinity(0)
    core = min(before)
    try:
        start(trainer={"cores": (core,)})
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)
    with pytest.raises(protocols.ConfigError, match=r"config\.trainer\.cores: there is no core 4095 for this process"):
        start(trainer={"cores": (4095,)})
    assert os.sched_getaffinity(0) == before


def test_a_missing_model_directory_is_refused(small):
    config = small.config(model={"path": "no/such/model"})
    with pytest.raises(protocols.DataError, match="no/such/model: no such model directory"):
        trainer.create(config_lib.to_dict(config), workdir="unused")


def test_one_step_gives_the_golden_metrics(small, start):
    metrics = start().train_step(_batch(small))
    if os.environ.get("LIBRA_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n")
    golden = json.loads(GOLDEN.read_text())
    changed = {
        name: (golden.get(name), metrics.get(name))
        for name in sorted(golden.keys() | metrics.keys())
        if name not in golden or name not in metrics or metrics[name] != pytest.approx(golden[name], rel=2e-4, abs=1e-6)
    }
    assert not changed, (
        f"one training step on fixed data gave other metrics (golden, now): {changed}. If that is meant, run this test "
        f"once with LIBRA_UPDATE_GOLDEN=1 in the environment and commit {GOLDEN.name} with the reason."
    )


def test_a_trainer_goes_from_mesh_to_mesh_and_nothing_it_holds_or_publishes_changes(small, start, tmp_path):
    made = start(trainer={"data": 8})
    made.train_step(_batch(small, 0))

    def everything():
        published = [made.stage_weights(1, index) for index in range(made.open_weights(1))]
        leaves = [np.array(leaf) for leaf in jax.tree.leaves(jax.device_get(made._learner.state))]
        return [memfd.open_peer(bucket.transport)[: bucket.nbytes] for bucket in published], leaves

    wire, leaves = everything()
    for data, fsdp in [(4, 1), (1, 2), (2, 4)]:
        estimate = made.begin_resize(protocols.MeshSizes(data, fsdp, 1))
        assert estimate.state_bytes == sum(leaf.nbytes for leaf in leaves)
        phases = made.finish_resize(120.0)
        assert phases.moved_bytes == estimate.arriving_bytes
        now, held = everything()
        assert now == wire
        assert all(np.array_equal(a, b) for a, b in zip(held, leaves, strict=True))
    with pytest.raises(protocols.ConfigError, match=r"rows_per_micro_batch: 8 does not divide over data x fsdp = 6"):
        made.begin_resize(protocols.MeshSizes(6, 1, 1))
    with pytest.raises(protocols.ConfigError, match=r"data 0 x fsdp 1 x tensor 1 cannot be.*must be positive"):
        made.begin_resize(protocols.MeshSizes(0, 1, 1))
    with pytest.raises(protocols.ConfigError, match="is not being changed"):
        made.resize_progress()
    assert np.isfinite(made.train_step(_batch(small, 1))["loss"])


def test_two_resizes_at_once_are_refused_and_one_that_is_cancelled_leaves_room_for_another(small, start):
    made = start(trainer={"data": 8})
    made.begin_resize(protocols.MeshSizes(4, 1, 1))
    with pytest.raises(protocols.ConfigError, match=r"cannot become data 2 .* while it becomes data 4"):
        made.begin_resize(protocols.MeshSizes(2, 1, 1))
    made.cancel_resize()
    made.begin_resize(protocols.MeshSizes(2, 1, 1))
    made.finish_resize(120.0)
    made.train_step(_batch(small, 0))
