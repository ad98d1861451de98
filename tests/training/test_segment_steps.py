"""Rollouts of several segments train as their segments laid out one a row, each with its whole context."""

import dataclasses
import pickle
from array import array

import jax
import numpy as np
import pytest
import segment_rollouts

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.data import packing
from libra_jax.training import step

TEMPERATURE = 0.8
REWARDS = (1.0, 0.25, 0.0)


def _config(shapes, row_tokens=96, rows=2, mesh=None, **groups):
    """A config with rows of a length, however short; attention is in blocks of 16 unless `model` says otherwise."""
    made = shapes.config(
        trainer={"row_tokens": 96, "rows_per_micro_batch": rows, **(mesh or {})},
        **{"model": {"attention_chunk": 16}, **groups},
    )
    return dataclasses.replace(
        made,
        rollout=dataclasses.replace(made.rollout, max_context=min(row_tokens, 48)),
        trainer=dataclasses.replace(made.trainer, row_tokens=row_tokens),
    )


def _rollouts(experts=0):
    """Two groups: of three rollouts of many segments, and of one such and a plain one."""
    made = [segment_rollouts.scripted(seed, f"p/{seed}", reward, experts) for seed, reward in enumerate(REWARDS)]
    return [
        *made,
        segment_rollouts.plain(3, "q/0", 0.0, experts),
        segment_rollouts.scripted(4, "q/1", 1.0, experts),
    ]


def _grpo(rollouts, divide=True):
    """The advantages of each segment, one formula a rollout."""
    found = []
    for rollout in rollouts:
        group = [other.reward for other in rollouts if other.prompt_id == rollout.prompt_id]
        scale = np.std(group, ddof=1) + 1e-6 if divide else 1.0
        rewards = [
            rollout.reward if each.index == 0 or each.reward is None else each.reward for each in rollout.segments
        ]
        found.append([(reward - np.mean(group)) / scale for reward in rewards])
    return found


def _sums(model, config, rollouts):
    """Loss and gradients of a step by the learner's own programs, and the prepared batch."""
    learner = model.learner(config)
    prepared = batch_lib.prepare(config, segment_rollouts.batch(rollouts), model.shape)
    packed = prepared.packed
    sums, _ = learner.sums(step.POLICY, learner.policy, packed, prepared.extras, range(len(packed.micro_batches)))
    count = float(sums.count)
    gradients = jax.tree.map(lambda leaf: np.asarray(leaf) / count, jax.device_get(sums.gradients))
    return float(sums.loss) / count, gradients, prepared


def _compare(found, wanted, bound=1e-5):
    """Loss and every gradient within `bound`, relative to the largest gradient of the leaf."""
    assert found[0] == pytest.approx(wanted[0], rel=bound)
    for (path, leaf), reference in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        error = np.abs(leaf - reference).max() / np.abs(reference).max()
        assert error <= bound, f"{jax.tree_util.keystr(path)}: {error}"


def _reference(model, rollouts, advantages, aggregation="token_mean"):
    arguments = model.params, model.shape, rollouts, advantages, TEMPERATURE, aggregation
    return segment_rollouts.loss_and_gradients(*arguments)


QUICK = [(96, "token_mean"), (48, "sequence_sum"), (26, "sequence_mean")]
"""Each length of rows and each aggregation once; the other pairs are drills."""

AGGREGATIONS = [
    pytest.param(rows, name, marks=() if (rows, name) in QUICK else pytest.mark.drill)
    for rows in (96, 48, 26)
    for name in ("token_mean", "sequence_mean", "sequence_sum")
]


@pytest.mark.parametrize(("row_tokens", "aggregation"), AGGREGATIONS)
def test_a_step_equals_unpacked_segments_in_float64(small, aggregation, row_tokens):
    """Rows that hold a whole tree, and rows for which it is split; several of a row, and blocks of attention."""
    rollouts = _rollouts()
    config = _config(small, row_tokens, algorithm=config_lib.AlgorithmConfig(aggregation=aggregation))
    *found, prepared = _sums(small, config, rollouts)
    assert bool(prepared.packed.split()) == (row_tokens < 60)
    kinds = [type(item) is packing.TreeMicroBatch for item in prepared.packed.micro_batches]
    assert kinds[0] is False, "a plain rollout keeps its program"
    assert any(kinds)
    has_divisors = [packing.ROLLOUT_TOKENS in extra for extra in prepared.extras]
    assert any(has_divisors) == (aggregation != "token_mean" and row_tokens < 60)
    _compare(found, _reference(small, rollouts, _grpo(rollouts), aggregation))


def test_a_segments_own_reward_is_compared_with_the_same_baseline(small):
    rollouts = _rollouts()
    rollouts[0].branches[1].reward = 0.5
    rollouts[1].branches[0].reward = 2.0
    for advantage, divide in (("grpo", True), ("dr_grpo", False)):
        config = _config(small, algorithm=config_lib.AlgorithmConfig(advantage=advantage))
        found = _sums(small, config, rollouts)
        _compare(found, _reference(small, rollouts, _grpo(rollouts, divide)))


def test_replayed_experts_follow_the_tokens_of_a_tree(sparse):
    rollouts = _rollouts(experts=8)
    config = _config(sparse, 48, algorithm=config_lib.AlgorithmConfig(routing_replay="rollout"))
    found = _sums(sparse, config, rollouts)
    _compare(found, _reference(sparse, rollouts, _grpo(rollouts)))


@pytest.mark.parametrize(
    "split",
    [
        (1, 2, 2, 2),
        *(
            pytest.param(split, marks=pytest.mark.drill)
            for split in [(1, 2, 1, 1), (2, 1, 2, 1), (1, 1, 1, 8), (1, 1, 8, 1), (1, 1, 2, 4)]
        ),
    ],
    ids=lambda split: "x".join(map(str, split)),
)
def test_trees_train_alike_on_every_mesh(small, split):
    """Of eight heads: `context` exchanges them. Where it splits the queries: `models/test_context_attention.py`."""
    rollouts = _rollouts()
    mesh = dict(zip(("data", "fsdp", "tensor", "context"), split, strict=True))
    made = []
    for axes in ({}, mesh):
        algorithm = config_lib.AlgorithmConfig(aggregation="sequence_mean")
        config = _config(small, rows=4, mesh=axes, model={"attention_chunk": 7}, algorithm=algorithm)
        made.append(_sums(small, config, rollouts))
    _compare(made[1], made[0])


def test_a_shared_prefix_is_computed_once(small, start_trainer):
    rollouts = _rollouts()
    actor = start_trainer(trainer={"row_tokens": 96, "rows_per_micro_batch": 1})
    actor._version = 1
    metrics = actor.train_step(pickle.loads(pickle.dumps(segment_rollouts.batch(rollouts))))
    # By hand: a scripted root computes 19 columns (20 tokens), a child 10, its own child 4, the summaries 8 and 7
    # (whose last token a further segment shares), that segment 3, the judge 4.
    assert len(rollouts[0].token_ids) == 20
    assert metrics["tokens/processed"] == 4 * (19 + 10 + 4 + 8 + 7 + 3 + 4) + len(rollouts[3].token_ids) - 1
    # Saved: 15 of the root, 20 of the child, 3 and 3 of the root, 10 of the second summary. That one alone would not
    # need its last token.
    assert metrics["tokens/shared"] == 4 * (15 + 20 + 3 + 3 + 10 - 1)


def test_parts_compute_shared_tokens_again_and_no_more(small):
    rollouts = [segment_rollouts.scripted(0, "p/0", 1.0), segment_rollouts.scripted(1, "p/1", 0.0)]
    config = _config(small, 26)
    prepared = batch_lib.prepare(config, segment_rollouts.batch(rollouts), small.shape)
    columns = [place.columns for place in prepared.packed.places if place.example == 0]
    # The root; the child with 15 of the root; its child with 20; the summaries and what forks from the second, with 3
    # of the root, and the judge.
    assert columns == [19, 25, 24, 3 + 8 + 7 + 3 + 4]
    assert prepared.packed.shared_columns == 2 * (3 + 10 - 1)


def test_without_branches_arrays_and_programs_stay_as_they_were(small):
    config = small.config(algorithm=config_lib.AlgorithmConfig(aggregation="sequence_mean"))
    learner = small.learner(config)
    rollouts = [segment_rollouts.plain(seed, f"p/{seed}", float(seed % 2)) for seed in range(6)]
    prepared = batch_lib.prepare(config, segment_rollouts.batch(rollouts), small.shape)
    arrays = [learner.inputs.arrays(prepared.packed, *each) for each in enumerate(prepared.extras)]
    names = {"tokens", "targets", "positions", "segments", "mask", "behaviour", "on_version", "advantages"}
    assert [set(each) for each in arrays] == [names] * len(arrays)
    _, wanted = learner.inputs.shapes()[-1]
    learner.train(prepared.packed, 1e-3, prepared.extras, prepared.packed.minibatches)
    assert [shape for name, shape in learner.programs.shapes if name == step.POLICY] == [wanted]


def test_the_first_trees_of_a_run_bring_the_programs_of_all_rows(small):
    config = small.config(trainer={"row_tokens": 96, "row_buckets": (128,)})
    learner = small.learner(config)
    before = len(learner.ahead.shapes())
    prepared = batch_lib.prepare(config, segment_rollouts.batch(_rollouts()), small.shape)
    learner.train(prepared.packed, 1e-3, prepared.extras, prepared.packed.minibatches)
    later = learner.ahead.shapes()[before:]
    assert [(name, batch["tokens"].shape[1], "until" in batch) for name, batch in later] == [
        (step.POLICY, 96, True),
        (step.POLICY, 128, True),
    ]
    learner.ahead.begin()
    assert learner.ahead.wait(300)
    assert learner.ahead.error is None
    assert len(learner.programs.shapes) == before + len(later)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"critic": {"enabled": True}, "algorithm": {"advantage": "gae"}}, r"critic\.enabled: trajectory p/0 has 7"),
        (
            {"algorithm": {"advantage": "reinforce_plus_plus", "kl_in_reward": True, "kl_coefficient": 0.1}},
            r"algorithm\.kl_in_reward: trajectory p/0 has 7 segments",
        ),
    ],
)
def test_settings_that_need_one_sequence_are_refused_by_name(small, groups, message):
    kinds = {"critic": config_lib.CriticConfig, "algorithm": config_lib.AlgorithmConfig}
    config = small.config(**{name: kinds[name](**fields) for name, fields in groups.items()})
    with pytest.raises(protocols.ConfigError, match=message):
        batch_lib.prepare(config, segment_rollouts.batch(_rollouts()), small.shape)


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_rewards_of_segments_need_an_advantage_with_a_baseline(small, advantage):
    rollouts = _rollouts()
    rollouts[0].branches[1].reward = 0.5
    config = small.config(algorithm=config_lib.AlgorithmConfig(advantage=advantage))
    with pytest.raises(protocols.ConfigError, match=r"algorithm\.advantage: segment p/0\+2 has a reward of its own"):
        batch_lib.prepare(config, segment_rollouts.batch(rollouts), small.shape)


def test_a_penalty_in_the_reward_sums_over_all_segments(small):
    """An advantage that compares rollouts pays for all of a rollout's tokens at once, in any order."""
    rollouts = _rollouts()
    algorithm = config_lib.AlgorithmConfig(
        advantage="dr_grpo", kl_in_reward=True, kl_coefficient=0.1, kl_estimator="k1"
    )
    for row_tokens in (96, 26):
        config = _config(small, row_tokens, algorithm=algorithm)

        def score(packed, extras):
            # A reference that finds each token more likely than the sampling policy, by 0.5.
            return [jax.numpy.asarray(np.where(item.mask, item.behaviour + 0.5, 0)) for item in packed.micro_batches]

        prepared = batch_lib.prepare(config, segment_rollouts.batch(rollouts), small.shape, score)
        paid = [
            rollout.reward + 0.05 * sum(sum(each.loss_mask[1:]) for each in rollout.segments) for rollout in rollouts
        ]
        for index, (advantage_N, example) in enumerate(
            zip(prepared.advantages, prepared.sequences.examples, strict=True)
        ):
            group = [
                reward
                for reward, other in zip(paid, rollouts, strict=True)
                if other.prompt_id == rollouts[index].prompt_id
            ]
            np.testing.assert_allclose(advantage_N[example.mask_N], paid[index] - np.mean(group), atol=1e-5)


def test_segments_that_do_not_fit_together_are_refused_by_name(small):
    config = small.config()
    for change in ({"shared": 99}, {"shared": 0}, {"parent": None}, {"reward": float("nan")}):
        rollouts = _rollouts()
        for field, value in change.items():
            setattr(rollouts[0].branches[0], field, value)
        with pytest.raises(protocols.DataError, match=r"p/0\+1"):
            batch_lib.prepare(config, segment_rollouts.batch(rollouts), small.shape)


def test_score_norms_of_trees_and_the_refusal_of_parts(small):
    rollouts = _rollouts()
    algorithm = config_lib.AlgorithmConfig(advantage="dr_grpo", baseline="minimum_variance")
    config = _config(small, algorithm=algorithm)
    learner = small.learner(config)
    batch = segment_rollouts.batch(rollouts)
    prepared = batch_lib.prepare(config, batch, small.shape, score_norms=learner.score_norms)
    norms = learner.score_norms(prepared.sequences.examples).norms_N
    for index in (0, 3, 4):
        # At a ratio of 1, the gradient of the sum of ratios is the score.
        matched = _at_policy(small, rollouts[index])
        _, gradients = _reference(small, [matched], [[1.0] * len(matched.segments)], "sequence_sum")
        squares = sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(gradients))
        assert norms[index] == pytest.approx(np.sqrt(squares), rel=1e-4)
    short = _config(small, 26, algorithm=algorithm)
    with pytest.raises(protocols.ConfigError, match=r"algorithm\.baseline: .*trajectory p/0 is longer than a row"):
        batch_lib.prepare(short, batch, small.shape, score_norms=learner.score_norms)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("loss", {"loss": "gspo"}),
        ("loss", {"loss": "gmpo"}),
        ("correction_level", {"correction": "masked", "correction_level": "geometric"}),
        ("ess_scaling", {"ess_scaling": "sqrt"}),
        ("balance_coefficient", {"balance_coefficient": 0.1}),
    ],
)
def test_what_looks_at_whole_rollouts_refuses_parts_by_name(small, name, fields):
    batch, algorithm = segment_rollouts.batch(_rollouts()), config_lib.AlgorithmConfig(**fields)
    batch_lib.prepare(_config(small, algorithm=algorithm), batch, small.shape)
    with pytest.raises(protocols.ConfigError, match=rf"algorithm\.{name}: .*trajectory p/0 is longer than a row"):
        batch_lib.prepare(_config(small, 26, algorithm=algorithm), batch, small.shape)


def _at_policy(model, rollout):
    """The same rollout, sampled by the policy itself."""
    copied = pickle.loads(pickle.dumps(rollout))
    params = jax.device_put(model.params)
    score = jax.jit(lambda tokens: segment_rollouts.log_probs(params, model.shape, tokens, TEMPERATURE))
    for segment in copied.segments:
        tokens = np.zeros(48, int)
        tokens[: segment.context_tokens] = segment.context()
        found = [0.0, *np.asarray(score(tokens)).tolist()]
        segment.log_probs = array("f", found[segment.shared : segment.context_tokens])
    return copied


def test_teachers_entropy_shares_and_staleness_go_by_segment(small):
    rollouts = _rollouts()
    for rollout in rollouts:
        for segment in rollout.segments:
            segment.teacher_log_probs.extend(-float(token) for token in segment.token_ids)
    algorithm = config_lib.AlgorithmConfig(
        teacher="http://localhost:1/v1",
        kl_coefficient=0.1,
        entropy_share=0.5,
        objective="decoupled",
        proximal="interpolate",
    )
    config = _config(small, 26)
    rollout = dataclasses.replace(config.rollout, temperature=1.0)
    config = dataclasses.replace(config, algorithm=algorithm, rollout=rollout)
    prepared = batch_lib.prepare(config, segment_rollouts.batch(rollouts, version=3), small.shape)
    trained = 0
    for item, extra in zip(prepared.packed.micro_batches, prepared.extras, strict=True):
        np.testing.assert_array_equal(extra["reference"][item.mask], -item.targets[item.mask].astype(np.float32))
        assert set(np.unique(extra["staleness"][item.mask])) <= {2.0, 3.0}
        trained += int(item.mask.sum())
    every = sum(sum(segment.loss_mask) for rollout in rollouts for segment in rollout.segments)
    assert 0 < trained < every
    kept, turns = prepared.described["turns/trained_share"]
    assert kept / turns == pytest.approx(0.5, abs=0.1)
    rollouts[1].branches[2].teacher_log_probs.pop()
    with pytest.raises(protocols.DataError, match=r"p/1\+3: the teacher has scored"):
        batch_lib.prepare(config, segment_rollouts.batch(rollouts), small.shape)
