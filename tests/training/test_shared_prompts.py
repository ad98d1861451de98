"""Rollouts of one prompt that share a row and their prompt (`trainer.share_prompt`)."""

import dataclasses

import hypothesis
import numpy as np
import pytest
import trainer_doubles as doubles
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.data import sequences as sequences_lib

OPTIMIZER = config_lib.OptimizerConfig(name="sgd", learning_rate=0.05, clip_norm=0.0)
ROW = 64


@st.composite
def groups(draw):
    """Sequences of a few prompts, those of a prompt side by side; some have no trained token, some two segments."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = rng.integers(0, 50, draw(st.integers(1, 12)))
        of_prompt = rng.integers(0, 8, (len(prompt), 2)).astype(np.uint8)
        for _ in range(draw(st.integers(1, 5))):
            answer = rng.integers(0, 50, draw(st.integers(0, 14)))
            mask_N = np.concatenate([np.zeros(len(prompt), bool), rng.random(len(answer)) < 0.7])
            if len(answer) and draw(st.booleans()):
                mask_N[len(prompt)] = True
            tokens_N = np.concatenate([prompt, answer]).astype(np.int32)
            behaviour_N = rng.random(len(tokens_N)).astype(np.float32)
            tree = None
            if len(tokens_N) > 1 and draw(st.booleans()):
                # A rollout of two segments, which shares no prompt.
                tree = sequences_lib.Tree((0, len(prompt), len(tokens_N)), (sequences_lib.NONE, 0), (0, len(prompt)))
                mask_N[len(prompt) : len(prompt) + 1] = False
            # Another version of the weights may have sent the prompt to other experts, or told none.
            routing = rng.integers(0, 8, (len(tokens_N), 2)).astype(np.uint8)
            if draw(st.booleans()):
                routing[: len(prompt)] = of_prompt
            routing = None if rng.random() < 0.1 else routing[: rng.integers(len(routing) + 1)]
            example = sequences_lib.Example(
                f"s{len(made)}", tokens_N, mask_N, behaviour_N, mask_N.copy(), routing, tree=tree
            )
            made.append(example)
    return made


@hypothesis.given(groups(), st.integers(1, 3))
def test_each_trained_token_is_predicted_from_its_own_context_alone(examples, rows):
    config = config_lib.TrainerConfig(row_tokens=ROW, rows_per_micro_batch=rows, share_prompt=True)
    packed, plain = (
        packing.pack(examples, config),
        packing.pack(examples, dataclasses.replace(config, share_prompt=False)),
    )
    values = [np.where(item.mask_N, np.arange(1, len(item.tokens_N) + 1), 0).astype(np.float32) for item in examples]
    lengths = [len(item.tokens_N) for item in examples]
    trained = [np.where(np.arange(length) > 0, value, 0) for length, value in zip(lengths, values, strict=True)]
    for found, wanted in zip(packed.gather(packed.scatter(values), lengths), trained, strict=True):
        np.testing.assert_array_equal(np.where(wanted > 0, found, 0), wanted)
    routed = packed.routing(examples, 2, np.dtype(np.uint8))
    for place, layout in zip(packed.places, packed.layouts, strict=True):
        item, example = packed.micro_batches[place.micro_batch], examples[place.example]
        if example.tree is not None:  # see tests/training/test_segment_trees.py
            continue
        segments, until = item.segments[place.row], getattr(item, "until", None)
        for column, target in zip(range(place.start, place.start + place.columns), layout.targets_C, strict=True):
            before = np.arange(column + 1)
            seen = before[segments[before] == segments[column]]
            seen = seen if until is None else seen[until[place.row][seen] > column]
            np.testing.assert_array_equal(item.tokens[place.row][seen], example.tokens_N[:target])
            of_row = {name: array[place.row][seen] for name, array in routed[place.micro_batch].items()}
            known = 0 if example.routing_RxW is None else len(example.routing_RxW[:target])
            np.testing.assert_array_equal(of_row["routed"], np.arange(target) < known)
            if known:
                np.testing.assert_array_equal(of_row["routing"][:known], example.routing_RxW[:known])
            assert item.positions[place.row][column] == target - 1
            assert item.targets[place.row][column] == example.tokens_N[target]
            assert item.mask[place.row][column] == example.mask_N[target]
    used, unshared = (sum(place.columns for place in each.places) for each in (packed, plain))
    assert used + packed.shared_columns == unshared + plain.shared_columns
    assert sum(item.mask.sum() for item in packed.micro_batches) == sum(item.mask.sum() for item in plain.micro_batches)


def batch(small, version):
    """Three groups of four rollouts, each group of one prompt."""
    made = doubles.batch(small, version, seed=version)
    rng = np.random.default_rng(100 + version)
    for group in made.groups:
        prompt = rng.integers(0, small.vocabulary, 9).tolist()
        for number, rollout in enumerate(group.trajectories):
            longer = protocols.Trajectory(rollout.trajectory_id, rollout.prompt_id, reward=rollout.reward)
            longer.append_text(prompt, protocols.TokenSource.PROMPT)
            for name in ("token_ids", "sources", "loss_mask", "log_probs", "policy_versions"):
                getattr(longer, name).extend(getattr(rollout, name)[3:])
            group.trajectories[number] = longer
    return made


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["one device", "eight devices"])
def test_steps_change_parameters_as_without_sharing_and_compute_fewer_tokens(small, start_trainer, mesh):
    plain, sharing = (
        start_trainer(trainer={"share_prompt": share, "row_tokens": 128, **mesh}, optimizer=OPTIMIZER)
        for share in (False, True)
    )
    for version in range(3):
        wanted, got = (actor.train_step(batch(small, version)) for actor in (plain, sharing))
        for name in ("loss", "grad_norm", "entropy", "groups/without_gradient", "kl/behaviour"):
            assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), (version, name)
        assert got["tokens/shared"] == 3 * 3 * 8
        assert got["tokens/processed"] == wanted["tokens/processed"] - got["tokens/shared"]
    for leaf, other in zip(doubles.params(sharing), doubles.params(plain), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("aggregation", "sequence_mean"),
        ("loss", "gspo"),
        ("correction_level", "sequence"),
        ("ess_scaling", "sqrt"),
        ("balance_coefficient", 0.5),
    ],
)
def test_what_looks_at_single_rollouts_is_refused_by_name(field, value):
    with pytest.raises(protocols.ConfigError, match=rf"algorithm\.{field}.*trainer\.share_prompt=False"):
        config_lib.RunConfig(
            trainer=config_lib.TrainerConfig(share_prompt=True),
            algorithm=config_lib.AlgorithmConfig(correction="masked", **{field: value}),
        )
