"""Experts that an engine chose, from a trajectory to the columns of a micro-batch and into the loss."""

import dataclasses

import jax
import numpy as np
import pytest
import small_model

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.data import sequences as sequences_lib
from libra_jax.training import step

SPARSE = small_model.sparse()


def _trajectory(seed, routed=None, name="p/0"):
    """A prompt of three tokens and a turn; `routed` tokens have experts, by default all but the last."""
    rng = np.random.default_rng(seed)
    made = protocols.Trajectory(name, name.split("/")[0], reward=float(seed % 2))
    made.append_text(rng.integers(0, 16, 3).tolist(), protocols.TokenSource.PROMPT)
    count = int(rng.integers(3, 15))
    routed = count + 2 if routed is None else routed
    chosen = [np.argsort(rng.random((2, 8)))[:, :2].astype(np.uint8).tobytes() for _ in range(routed)]
    tokens, log_probs = tuple(rng.integers(0, 16, count).tolist()), (-2.0,) * count
    made.append_sampled(protocols.TokenDelta(tokens, log_probs, (0,) * count, "stop", tuple(chosen)))
    return made


def _config(small, replay="rollout", **algorithm):
    return small.config(algorithm=config_lib.AlgorithmConfig(routing_replay=replay, **algorithm))


def _batch(trajectories):
    task = protocols.Task("p", {})
    return protocols.TrainBatch(0, (protocols.Group(0, task, 0, trajectories),))


def test_each_input_column_has_the_experts_of_its_own_token(small):
    trajectories = [_trajectory(seed, routed) for seed, routed in ((1, None), (2, 4), (3, 0), (4, None), (5, None))]
    prepared = batch_lib.prepare(_config(small), _batch(trajectories), SPARSE)
    seen = {number: np.zeros(item.tokens.shape, bool) for number, item in enumerate(prepared.packed.micro_batches)}
    for trajectory, place in zip(trajectories, prepared.packed.places, strict=True):
        extra = prepared.extras[place.micro_batch]
        for column in range(place.columns):
            at = place.row, place.start + column
            known = column < len(trajectory.routing)
            assert extra["routed"][at] == known
            seen[place.micro_batch][at] = known
            if known:
                assert extra["routing"][at].tobytes() == trajectory.routing[column]
    for number, extra in enumerate(prepared.extras):
        assert extra["routing"].dtype == np.uint8
        np.testing.assert_array_equal(extra["routed"], seen[number])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.routing.__setitem__(2, b"\x01\x02\x03"), r"p/0: .* 5 of its .* \[3, 4\] bytes .* take 4"),
        (lambda t: t.routing.__setitem__(2, bytes([0, 1, 8, 2])), r"p/0: .* returned expert 8, and the model has 8"),
        (
            lambda t: t.routing.__setitem__(2, bytes([0, 1, 3, 3])),
            r"p/0: .* expert twice in layer 1 of token 2;",
        ),
        (lambda t: t.routing.extend([bytes(4)] * 40), r"p/0: the engine returned experts for 45 of its"),
    ],
)
def test_experts_that_are_not_the_models_are_refused_by_name(change, message):
    trajectory = _trajectory(1, routed=5)
    change(trajectory)
    with pytest.raises(protocols.DataError, match=message):
        sequences_lib.examples([trajectory], 0, SPARSE)


def test_a_batch_without_experts_is_refused_rather_than_trained_without_replay(small):
    with pytest.raises(protocols.DataError, match=r"p/0 and all others .* without experts, .*routing_replay=rollout"):
        batch_lib.prepare(_config(small), _batch([_trajectory(1, 0), _trajectory(2, 0)]), SPARSE)


def test_more_than_256_experts_take_two_bytes_each():
    many = dataclasses.replace(SPARSE, num_experts=300)
    trajectory = _trajectory(1, routed=0)
    trajectory.routing = [np.array([299, 1, 2, 257], "<u2").tobytes()] * 3
    (example,) = sequences_lib.examples([trajectory], 0, many)
    np.testing.assert_array_equal(example.routing_RxW, [[299, 1, 2, 257]] * 3)


def test_policy_and_reference_take_given_experts_in_ready_programs(sparse):
    trajectories = [_trajectory(seed, name=f"p/{seed}") for seed in range(4)]
    ratios = {}
    for replay in ("off", "rollout"):
        config = _config(sparse, replay, kl_coefficient=0.1)
        made = sparse.learner(config)
        # Large enough that another choice of experts makes another policy.
        made.begin(jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 2 else leaf, made.params))
        prepared = batch_lib.prepare(config, _batch(trajectories), SPARSE, made.reference_log_probs)
        scored = [(name, set(shapes)) for name, shapes in made.programs.shapes]
        assert scored == [(step.SCORE, set(made.inputs.empty(step.SCORE)))]
        arrays = vars(prepared.packed.micro_batches[0]) | prepared.extras[0]
        ahead = made.inputs.empty(step.POLICY)
        assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
            name: (array.shape, array.dtype) for name, array in ahead.items()
        }
        sums, report = made.sums(step.POLICY, made.params, prepared.packed, prepared.extras, [0])
        ratios[replay] = report["maxima"]["mismatch/ratio_max"]
        total, count = report["metrics"]["kl/reference"]
        assert total / count < 1e-9, "the policy is still the reference model"
        if replay == "rollout":
            replayed, trained = report["metrics"]["router/replayed"]
            assert replayed == trained > 0
        assert np.abs(jax.device_get(sums.gradients["layers"]["mlp"]["gate"]["weight"])).max() > 0
    assert abs(ratios["off"] - ratios["rollout"]) > 1e-5


def test_given_experts_give_one_devices_gradients_on_a_mesh_that_splits_rows(sparse):
    trajectories, found = [_trajectory(seed, name=f"p/{seed}") for seed in range(4)], []
    for mesh in ({}, {"fsdp": 2, "tensor": 2, "context": 2}):
        algorithm = config_lib.AlgorithmConfig(routing_replay="rollout")
        config = sparse.config(trainer=mesh, algorithm=algorithm)
        made = sparse.learner(config)
        prepared = batch_lib.prepare(config, _batch(trajectories), SPARSE)
        sums, _ = made.sums(step.POLICY, made.params, prepared.packed, prepared.extras, [0])
        found.append(jax.device_get(sums.gradients))
    for ours, whole in zip(*map(jax.tree.leaves, reversed(found)), strict=True):
        np.testing.assert_allclose(ours, whole, atol=1e-5 * np.abs(whole).max(), rtol=0)
