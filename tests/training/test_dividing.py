"""Parts of a batch for the processes of a trainer, against what a process with the whole batch lays out."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import small_model
import trainer_doubles as doubles
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.data import dividing, packing

ROWS, VERSION = 4, 1
TRAINER = config_lib.TrainerConfig(
    row_tokens=small_model.ROW_TOKENS, row_buckets=(2 * small_model.ROW_TOKENS,), rows_per_micro_batch=ROWS
)
ROLLOUT = dataclasses.replace(small_model.ROLLOUT, tensor_parallel=(1, 1))
SHAPE = small_model.sparse()


def run_config(trainer=TRAINER, **groups):
    return config_lib.RunConfig(rollout=ROLLOUT, trainer=trainer, **groups)


def rollout(draw, rng, name, reward):
    """A turn of any length up to the longest row, with experts of some tokens or of none; or no turn."""
    made = protocols.Trajectory(name, name.split("/")[0], reward=reward)
    made.append_text(rng.integers(0, small_model.VOCABULARY, 3).tolist(), protocols.TokenSource.PROMPT)
    count = draw(st.sampled_from([0, 1, 5, 14, 2 * small_model.ROW_TOKENS - 8]))
    if count:
        known = draw(st.sampled_from([0, count]))
        experts = [rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (2, 1)), axis=1)[:, :2] for _ in range(known)]
        tokens = tuple(rng.integers(0, small_model.VOCABULARY, count).tolist())
        versions, routing = (draw(st.integers(0, VERSION)),) * count, tuple(each.tobytes() for each in experts)
        log_probs = tuple(rng.normal(-3, 1, count).tolist())
        made.append_sampled(protocols.TokenDelta(tokens, log_probs, versions, "stop", routing))
    made.finish = draw(st.sampled_from(["answered", "answered", "max_seconds"]))
    made.metrics = {"moves": float(draw(st.booleans()))}
    return made


@st.composite
def batches(draw):
    """Groups of rollouts of a turn, some of them without an answer in time, with rewards of any size."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    groups = []
    for number in range(draw(st.integers(1, 5))):
        made = [
            rollout(draw, rng, f"p{number}/{index}", draw(st.sampled_from([0.0, 1.0, -2.5])))
            for index in range(draw(st.integers(1, 4)))
        ]
        groups.append(protocols.Group(number, protocols.Task(f"p{number}", {"text": "long"}), 0, made))
    begun = draw(st.lists(st.sampled_from(range(len(groups))), unique=True, max_size=len(groups) - 1))
    return protocols.TrainBatch(VERSION, tuple(groups), tuple(begun))


@st.composite
def holders(draw):
    """The rows that each of several processes holds: a share of its own, or the same as another one."""
    ways = draw(st.sampled_from([1, 2, 4]))
    shares = [tuple(range(first, first + ROWS // ways)) for first in range(0, ROWS, ROWS // ways)]
    return shares * draw(st.integers(1, 2))


def arrays(prepared):
    """All arrays of all micro-batches, by name, in order."""
    return [
        {**vars(item), **extras} for item, extras in zip(prepared.packed.micro_batches, prepared.extras, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    batches(),
    holders(),
    st.sampled_from([*config_lib.REWARD_ADVANTAGES, "grpo, leave_one_out"]),
    st.sampled_from(["off", "rollout"]),
    st.integers(1, 2),
)
def test_each_process_lays_out_its_rows_and_reports_the_numbers_of_the_whole_batch(
    batch, rows, named, routing, minibatches
):
    advantage, _, baseline = named.partition(", ")
    if minibatches > 1:
        batch = dataclasses.replace(batch, begun=())
    config = run_config(
        algorithm=config_lib.AlgorithmConfig(
            advantage=advantage,
            baseline=baseline or "mean",
            proximal="interpolate",
            objective="decoupled",
            routing_replay=routing,
            minibatches=minibatches,
        ),
        task=config_lib.TaskConfig(cut_off="mask"),
    )
    parts = dividing.divide(config, batch, rows)
    for whole in (batch.rest, batch.of(batch.begun)):
        if not whole.groups:
            continue
        wanted = refused = None
        try:
            wanted = batch_lib.prepare(config, whole, SHAPE)
        except protocols.LibraError as error:
            refused = str(error)
        numbers = [group.group_id for group in whole.groups]
        for own, part in zip(rows, parts, strict=True):
            joined = part.joined()
            assert joined.begun == batch.begun
            if wanted is None:
                with pytest.raises(protocols.LibraError, match=re.escape(refused)):
                    batch_lib.prepare(config, joined.of(numbers), SHAPE)
                continue
            got = batch_lib.prepare(config, joined.of(numbers), SHAPE)
            assert got.packed.places == wanted.packed.places
            assert (got.work, got.packed.minibatches) == (wanted.work, wanted.packed.minibatches)
            assert got.packed.size == wanted.packed.size
            pairs = [sum(layout.pairs for layout in each.packed.layouts) for each in (got, wanted)]
            assert pairs[0] == pairs[1]
            for number, (mine, theirs) in enumerate(zip(arrays(got), arrays(wanted), strict=True)):
                assert mine.keys() == theirs.keys()
                for name in theirs:
                    np.testing.assert_array_equal(mine[name][list(own)], theirs[name][list(own)], err_msg=name)
                lengths = [each.packed.sequence_lengths(number) for each in (got, wanted)]
                np.testing.assert_array_equal(*lengths)
            described = [batch_lib.statistics([each]) for each in (got, wanted)]
            assert described[0] == pytest.approx(described[1], abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(batches(), holders())
def test_a_process_takes_the_rollouts_in_its_rows_and_no_others(batch, rows):
    config = run_config(task=config_lib.TaskConfig(cut_off="mask"))
    parts = dividing.divide(config, batch, rows)
    rollouts = [rollout for group in batch.groups for rollout in group.trajectories]
    wanted = [set() for _ in rows]
    for part in (batch.rest, batch.of(batch.begun)):
        if part.groups:
            of_part = [rollout for group in part.groups for rollout in group.trajectories]
            examples = [small_example(config, rollout) for rollout in of_part]
            for place in packing.pack(examples, config.trainer).places:
                for taken, own in zip(wanted, rows, strict=True):
                    if place.row in own:
                        taken.add(rollouts.index(of_part[place.example]))
    untrained = {number for number, one in enumerate(rollouts) if not small_example(config, one).columns}
    for taken, own in zip(wanted, rows, strict=True):
        if tuple(own) == tuple(rows[0]):
            taken |= untrained  # to be checked
    assert [set(part.held) for part in parts] == wanted
    for part in parts:
        assert all(rollouts[number] is rollout for number, rollout in part.held.items())
        outlined = [rollout for group in part.outlines.groups for rollout in group.trajectories]
        assert not any(len(rollout.token_ids) for rollout in outlined)
        assert part.outlines is parts[0].outlines


def small_example(config, rollout):
    (example,) = batch_lib.sequences_lib.examples([rollout], VERSION, SHAPE, [config.task.masks(rollout.finish)])
    return example


@pytest.mark.parametrize(
    "groups",
    [
        {"algorithm": config_lib.AlgorithmConfig(advantage="opo")},
        {"algorithm": config_lib.AlgorithmConfig(advantage="grpo", baseline="length")},
        {"algorithm": config_lib.AlgorithmConfig(advantage="grpo", kl_coefficient=0.1, kl_in_reward=True)},
        {"algorithm": config_lib.AlgorithmConfig(entropy_share=0.5)},
        {"algorithm": config_lib.AlgorithmConfig(loss="bapo")},
        {"trainer": dataclasses.replace(TRAINER, share_prompt=True)},
    ],
)
def test_settings_that_look_at_all_tokens_leave_the_batch_whole(groups):
    rng = np.random.default_rng(0)
    made = [doubles.attempt(0, index, rng, small_model.VOCABULARY, VERSION) for index in range(2)]
    batch = protocols.TrainBatch(0, (protocols.Group(0, protocols.Task("p0", {}), 0, made),))
    assert dividing.divide(run_config(**groups), batch, [(0, 1), (2, 3)]) is None
    own_loss = run_config(algorithm=config_lib.AlgorithmConfig(loss="package.module:loss"))
    for config in (run_config(), own_loss):
        assert dividing.divide(config, batch, [(0, 1), (2, 3)]) is not None
    made[0].branch(made[0], 2)
    assert dividing.divide(run_config(), batch, [(0, 1), (2, 3)]) is None
