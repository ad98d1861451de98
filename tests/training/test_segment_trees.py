"""Layouts of random trees: what a token sees, what is trained, and what is kept, against brute force over contexts."""

import dataclasses
import itertools

import numpy as np
import pytest
import segment_rollouts
import small_model
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing, row_places
from libra_jax.data import sequences as sequences_lib

SHAPE = small_model.shape()


@st.composite
def cases(draw):
    """Rollouts, and rows that the longest context fits."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rollouts = [
        segment_rollouts.random_rollout(rng, draw(st.integers(1, 9)), f"p/{number}")
        for number in range(draw(st.integers(1, 4)))
    ]
    longest = max(segment.context_tokens for rollout in rollouts for segment in rollout.segments)
    rows = draw(st.integers(max(1, longest), 4 * longest + 1))
    config = config_lib.TrainerConfig(
        row_tokens=rows, rows_per_micro_batch=draw(st.integers(1, 3)), pack=draw(st.booleans())
    )
    return rollouts, config


def _owners(rollout):
    """For each segment, the index of each token of its context among the rollout's own tokens."""
    starts = np.cumsum([0, *(len(segment.token_ids) for segment in rollout.segments)])
    found = []
    for segment in rollout.segments:
        before = found[segment.parent.index][: segment.shared] if segment.parent is not None else []
        found.append([*before, *range(starts[segment.index], starts[segment.index + 1])])
    return found


def _trained(rollout):
    """Indices of the tokens that are trained: each segment's sampled own tokens after its first one."""
    start, found = 0, []
    for segment in rollout.segments:
        found += [start + at for at, sampled in enumerate(segment.loss_mask) if sampled and at]
        start += len(segment.token_ids)
    return found


def _visible(layout):
    """True where a query may attend to a key, both [C]."""
    columns = np.arange(layout.columns)
    until_C = np.full(layout.columns, layout.columns) if layout.until_C is None else layout.until_C
    return (columns[None] <= columns[:, None]) & (columns[:, None] < until_C[None])


@settings(max_examples=150)
@given(cases())
def test_a_token_sees_its_context_and_each_target_follows_it(case):
    rollouts, config = case
    for rollout, example in zip(rollouts, sequences_lib.examples(rollouts, 0, SHAPE), strict=True):
        contexts, trained = _owners(rollout), []
        for layout in row_places.example_layouts(example, config.row_tokens):
            assert layout.columns <= config.row_tokens
            visible = _visible(layout)
            for column in range(layout.columns):
                index = layout.inputs_C[column]
                context = next(each[: each.index(index) + 1] for each in contexts if index in each)
                assert sorted(layout.inputs_C[visible[column]]) == sorted(context), "each token once"
                assert layout.positions_C[column] == len(context) - 1
                target = layout.targets_C[column]
                if target != sequences_lib.NONE:
                    assert any((index, target) in itertools.pairwise(each) for each in contexts)
                    trained += [target] if example.mask_N[target] else []
        assert sorted(trained) == _trained(rollout)


@settings(max_examples=150)
@given(cases())
def test_a_layout_keeps_no_column_without_an_effect(case):
    rollouts, config = case
    for example in sequences_lib.examples(rollouts, 0, SHAPE):
        for layout in row_places.example_layouts(example, config.row_tokens):
            visible, targets_C = _visible(layout), layout.targets_C
            trains = (targets_C != sequences_lib.NONE) & example.mask_N[targets_C]
            assert (visible[trains].any(axis=0)).all(), "some trained prediction sees each column"


@settings(max_examples=100)
@given(cases())
def test_packed_trees_scatter_and_gather_every_trained_token(case):
    rollouts, config = case
    examples = sequences_lib.examples(rollouts, 0, SHAPE)
    packed = packing.pack(examples, config)
    values = [np.arange(1, len(example.tokens_N) + 1, dtype=np.float32) for example in examples]
    arrays = packed.scatter(values)
    masks = packed.scatter([example.mask_N.astype(np.float32) for example in examples])
    for item, array, mask in zip(packed.micro_batches, arrays, masks, strict=True):
        np.testing.assert_array_equal(item.mask, mask > 0)
        assert (array[item.mask] > 0).all()
    seen = np.zeros(len(examples))
    for place, layout in zip(packed.places, packed.layouts, strict=True):
        item, example = packed.micro_batches[place.micro_batch], examples[place.example]
        np.testing.assert_array_equal(item.tokens[place.where], example.tokens_N[layout.inputs_C])
        assert len(np.unique(item.segments[place.where])) == 1
        forks = layout.until_C is not None
        assert isinstance(item, packing.TreeMicroBatch) == forks, "trees and plain sequences never share"
        if forks:
            np.testing.assert_array_equal(item.until[place.where], place.start + layout.until_C)
        seen[place.example] += item.mask[place.where].sum()
    for item in packed.micro_batches:
        if isinstance(item, packing.TreeMicroBatch):
            assert not item.until[item.segments == 0].any()
    back = packed.gather(arrays, [len(value) for value in values])
    for rollout, value, got, count in zip(rollouts, values, back, seen, strict=True):
        trained = (
            _trained(rollout) if rollout.branches else [at for at, out in enumerate(rollout.loss_mask) if out and at]
        )
        assert count == len(trained)
        np.testing.assert_array_equal(got[trained], value[trained])
        assert set(got) <= {0.0, *value}


@settings(max_examples=40)
@given(cases(), cases())
def test_minibatches_keep_the_places_of_their_trees(first, second):
    (rollouts, config), (others, _) = first, second
    config = dataclasses.replace(config, row_tokens=400)
    parts = [sequences_lib.examples(each, 0, SHAPE) for each in (rollouts, others)]
    examples = [*parts[0], *parts[1]]
    packed = packing.pack(examples, config, [len(part) for part in parts])
    alone = [packing.pack(part, config) for part in parts]
    for numbers, part in zip(packed.minibatches, alone, strict=True):
        for number, item in zip(numbers, part.micro_batches, strict=True):
            for name, array in vars(item).items():
                np.testing.assert_array_equal(vars(packed.micro_batches[number])[name], array)
    values = [np.arange(1, len(example.tokens_N) + 1, dtype=np.float32) for example in examples]
    back = packed.gather(packed.scatter(values), [len(value) for value in values])
    for example, value, got in zip(examples, values, back, strict=True):
        trained = np.flatnonzero(example.mask_N[1:]) + 1
        np.testing.assert_array_equal(got[trained], value[trained])


@settings(max_examples=60)
@given(cases())
def test_experts_are_laid_out_by_the_input_token(case):
    rollouts, config = case
    examples = sequences_lib.examples(rollouts, 0, SHAPE)
    rng = np.random.default_rng(0)
    known = [np.flatnonzero(rng.random(len(example.tokens_N)) < 0.7) for example in examples]
    examples = [
        sequences_lib.Example(**{**vars(example), "routing_RxW": at[:, None].astype(np.uint16), "routed_R": at})
        for example, at in zip(examples, known, strict=True)
    ]
    packed = packing.pack(examples, config)
    made = packed.routing(examples, 1, np.dtype(np.uint16))
    for place, layout in zip(packed.places, packed.layouts, strict=True):
        arrays = made[place.micro_batch]
        has_C = np.isin(layout.inputs_C, known[place.example])
        np.testing.assert_array_equal(arrays["routed"][place.where], has_C)
        np.testing.assert_array_equal(arrays["routing"][place.where][has_C, 0], layout.inputs_C[has_C])


def test_a_fork_without_a_tail_is_a_plain_sequence():
    script = segment_rollouts.Script(0, "p/0", 1.0)
    root = script.rollout
    script.text(root, 4)
    script.output(root, 3)
    other = script.branch(root, 5)
    script.text(other, 2)
    script.output(other, 3)
    root.loss_mask[5] = root.loss_mask[6] = 0
    (example,) = sequences_lib.examples([root], 0, SHAPE)
    (layout,) = row_places.example_layouts(example, 64)
    assert layout.until_C is None
    np.testing.assert_array_equal(layout.positions_C, np.arange(9))
    np.testing.assert_array_equal(layout.targets_C, [1, 2, 3, 4, 5, 8, 9, 10, 11])


def test_a_path_longer_than_every_row_is_refused_by_name():
    rollout = segment_rollouts.scripted(0, "p/0", 1.0)
    config = config_lib.TrainerConfig(row_tokens=24)
    with pytest.raises(protocols.ConfigError, match=r"p/0 needs a row of 25 tokens and the longest row has 24"):
        packing.pack(sequences_lib.examples([rollout], 0, SHAPE), config)


def test_a_long_chain_of_rewritten_histories_is_laid_out():
    """Deeper than Python's recursion limit."""
    script = segment_rollouts.Script(0, "p/0", 1.0)
    segment = script.rollout
    script.text(segment, 2)
    for _ in range(3000):
        script.output(segment, 3)
        fork = segment.context_tokens - 2
        segment = script.branch(segment, fork)
    script.output(segment, 2)
    (example,) = sequences_lib.examples([script.rollout], 0, SHAPE)
    (layout,) = row_places.example_layouts(example, 1 << 20)
    assert layout.positions_C.max() == 3002
    assert layout.until_C is not None
