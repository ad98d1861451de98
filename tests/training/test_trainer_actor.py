"""The trainer through its protocol: warm start, steps, metrics, refusals."""

import asyncio
import dataclasses
import json
import os
import pathlib
from array import array

import jax
import numpy as np
import pytest
import torch
import trainer_doubles as doubles
import transformers
from torch.utils import flop_counter

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.training import trainer

GOLDEN = pathlib.Path(__file__).parent / "golden_step.json"


def test_start_tells_what_it_is_and_a_step_reports_its_metrics(small, start_trainer):
    config = config_lib.to_dict(small.config(trainer={"data": 2}))
    actor = trainer.create({**config, "steps": 4}, workdir="unused")
    with pytest.raises(protocols.LibraError, match="call start first"):
        actor.train_step(doubles.batch(small))
    actor = start_trainer(trainer={"data": 2})
    metrics = actor.train_step(doubles.batch(small))
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


def test_the_flops_of_a_step_are_those_that_torch_counts(small, start_trainer, model_directory):
    actor = start_trainer(trainer={"data": 2, "peak_flops": 4e12})
    batch = doubles.batch(small)
    metrics = actor.train_step(batch)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory, attn_implementation="eager")
    counted, tokens, squares = flop_counter.FlopCounterMode(display=False), 0, 0
    with counted:
        for trajectory in (trajectory for group in batch.groups for trajectory in group.trajectories):
            columns = int(np.flatnonzero(trajectory.loss_mask)[-1])  # tokens up to the last one that is trained
            model(torch.tensor([trajectory.token_ids[:columns]])).logits.sum().backward()
            tokens, squares = tokens + columns, squares + columns**2
    # Eager attention multiplies every pair of tokens, and half of the pairs are causal. N has norms and biases too.
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    acausal = 6 * small.shape.num_layers * small.shape.num_heads * small.shape.head_dim * squares
    assert metrics["train/flops"] == pytest.approx(counted.get_total_flops() - acausal + 6 * vectors * tokens, rel=1e-3)
    assert metrics["train/devices"] == 2
    info = actor.stand_by()
    assert (info.platform, info.device_kind, info.peak_flops) == ("cpu", "cpu", 4e12)


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


def test_mismatch_is_measured_on_the_scoring_versions_tokens_only_against_transformers(
    small, start_trainer, model_directory
):
    actor = start_trainer()
    batch = doubles.batch(small)
    for trajectory in _scored_by_transformers(batch, model_directory):
        for index in np.flatnonzero(trajectory.loss_mask)[1::3]:
            trajectory.log_probs[index] -= 0.5
            trajectory.policy_versions[index] = -5
    metrics = actor.train_step(batch)
    assert metrics["mismatch/kl"] < 1e-9
    assert metrics["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["offpolicy/kl"] == pytest.approx(np.expm1(0.5) - 0.5, rel=1e-3)


def test_the_mismatch_of_trajectories_that_moved_is_told_apart(small, start_trainer, model_directory, request):
    start_trainer()  # compiles fast from here on
    config = small.config(model={"path": model_directory})
    rollout = dataclasses.replace(config.rollout, tensor_parallel=(1, 2))
    actor = trainer.create(config_lib.to_dict(dataclasses.replace(config, rollout=rollout)), workdir="unused")
    request.addfinalizer(actor.shutdown)
    actor.start()
    batch = doubles.batch(small)
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
    unmoved = actor.train_step(doubles.batch(small, version=1))
    assert "mismatch/kl" in unmoved
    assert not [name for name in unmoved if name.startswith("mismatch/moved")]


def test_without_a_token_of_the_scoring_version_no_mismatch_is_reported(small, start_trainer):
    metrics = start_trainer().train_step(doubles.batch(small, sampled_by=-5))
    assert not [name for name in metrics if name.startswith("mismatch/")]
    assert metrics["ratio/max"] > 0
    assert metrics["offpolicy/kl"] > 0


def test_warm_start_learns_and_training_begins_with_a_fresh_optimizer(small, start_trainer):
    warm = config_lib.WarmStartConfig(steps=5, learning_rate=1e-2)
    actor = start_trainer(warm_start=warm, algorithm=config_lib.AlgorithmConfig(kl_coefficient=0.1))
    rng = np.random.default_rng(0)
    sequences = [doubles.attempt(0, index, rng, small.vocabulary) for index in range(4)]
    losses = [actor.warm_start_step(sequences)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    warmed = doubles.params(actor)
    first = actor.train_step(doubles.batch(small))
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-7)
    assert actor.open_weights(1) > 0
    state = actor.running().learner.state
    assert int(state.step) == 1
    assert max(int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == np.int32) == 1
    for leaf, wanted in zip(jax.tree.leaves(state.reference), warmed, strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    with pytest.raises(protocols.LibraError, match="comes before training"):
        actor.warm_start_step(sequences)


@pytest.mark.parametrize("decoupled", [True, False])
def test_penalty_in_reward_and_decoupled_objective_run_through_the_trainer(small, start_trainer, decoupled):
    algorithm = config_lib.AlgorithmConfig(
        advantage="reinforce_plus_plus",
        kl_coefficient=0.1,
        kl_in_reward=True,
        objective="decoupled" if decoupled else "behaviour",
        correction="truncated",
    )
    actor = start_trainer(algorithm=algorithm)
    metrics = actor.train_step(doubles.batch(small, 0, sampled_by=-3))
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
        (lambda trajectory: trajectory.loss_mask.pop(), "trajectory p1/2: its columns have different lengths"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_the_trajectorys_name(small, start_trainer, change, sentence):
    actor = start_trainer()
    before = doubles.params(actor)
    batch = doubles.batch(small)
    change(batch.groups[1].trajectories[2])
    with pytest.raises(protocols.DataError, match=sentence):
        actor.train_step(batch)
    actor.train_step(doubles.batch(small))  # the version has not moved and the trainer still works
    assert any((leaf != old).any() for leaf, old in zip(doubles.params(actor), before, strict=True))


def test_batches_of_another_version_or_without_a_trained_token_are_refused(small, start_trainer):
    actor = start_trainer()
    with pytest.raises(protocols.LibraError, match="for policy version 3 and the trainer holds 0"):
        actor.train_step(doubles.batch(small, 3))
    batch = doubles.batch(small)
    for group in batch.groups:
        for trajectory in group.trajectories:
            trajectory.loss_mask = array("b", bytes(len(trajectory.token_ids)))
    with pytest.raises(protocols.LibraError, match="no token of the batch's 12 sequences is under the loss mask"):
        actor.train_step(batch)


def test_a_run_whose_steps_stay_not_finite_stops_with_a_sentence(small, start_trainer):
    actor = start_trainer(trainer={"max_skipped_steps": 2})
    learner = actor.running().learner
    learner.begin(jax.tree.map(lambda leaf: leaf * np.nan, learner.params))
    assert [actor.train_step(doubles.batch(small, version))["skipped"] for version in (0, 1)] == [1, 1]
    with pytest.raises(protocols.LibraError, match=r"max_skipped_steps: 3 steps in a row .* not finite"):
        actor.train_step(doubles.batch(small, 2))


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"trainer": {"data": 8, "fsdp": 2, "rows_per_micro_batch": 16}}, "needs 16 devices and there are 8"),
        ({"trainer": {"fsdp": 1, "tensor": 3}}, "3 does not divide"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(start_trainer, groups, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        start_trainer(**groups)


def test_a_pinned_trainer_runs_on_its_cores_and_a_core_that_is_not_there_is_refused(start_trainer):
    before = os.sched_getaffinity(0)
    core = min(before)
    try:
        start_trainer(trainer={"cores": (core,)})
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)
    with pytest.raises(protocols.ConfigError, match=r"config\.trainer\.cores: there is no core 4095 for this process"):
        start_trainer(trainer={"cores": (4095,)})
    assert os.sched_getaffinity(0) == before


def test_a_missing_model_directory_is_refused(small):
    config = small.config(model={"path": "no/such/model"})
    with pytest.raises(protocols.DataError, match="no/such/model: no such model directory"):
        trainer.create(config_lib.to_dict(config), workdir="unused")


def test_one_step_gives_the_golden_metrics(small, start_trainer):
    metrics = start_trainer().train_step(doubles.batch(small))
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


def test_a_step_that_is_given_up_leaves_the_state_as_it_was_and_the_same_batch_trains_afterwards(small, start_trainer):
    settings = {"trainer": {"rows_per_micro_batch": 1}}
    actor, untouched = start_trainer(**settings), start_trainer(**settings)
    before, batch = doubles.params(actor), doubles.batch(small)
    programs, steps = actor.running().learner.programs, []
    grad_step = programs.grad_step

    def counted(*arguments):
        steps.append(arguments)
        if len(steps) == 2:
            assert asyncio.run(actor.abort_step())
        return grad_step(*arguments)

    programs.grad_step = counted
    with pytest.raises(protocols.StepAborted, match=r"aborted after 2 of its micro-batches"):
        actor.train_step(batch)
    assert len(steps) == 2
    assert actor.policy_version() == 0
    for now, then in zip(doubles.params(actor), before, strict=True):
        np.testing.assert_array_equal(now, then)
    programs.grad_step = grad_step
    metrics, wanted = actor.train_step(batch), untouched.train_step(batch)
    assert metrics["loss"] == wanted["loss"]
    for now, then in zip(doubles.params(actor), doubles.params(untouched), strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_trainer_of_several_processes_gives_no_step_up(small):
    config = config_lib.to_dict(
        small.config(trainer={"data": 2, "processes": 2}, cluster=config_lib.ClusterConfig("ray"))
    )
    actor = trainer.create({**config, "steps": 4}, workdir="unused")
    assert not asyncio.run(actor.abort_step())
