"""PPO's critic: known values of a chain, checkpoints, warm-up, meshes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
import trainer_doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import advantages
from libra_jax.data import batch as batch_lib
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import transformer
from libra_jax.training import critic as critic_lib

STATES, LEFT, RIGHT = 5, 10, 11
DISCOUNT = 0.9
TURNS = 12


def _groups(**algorithm):
    return {
        "algorithm": config_lib.AlgorithmConfig(advantage="gae", **algorithm),
        "critic": config_lib.CriticConfig(enabled=True, learning_rate=1e-2),
    }


class Chain:
    """Five states in a row; the episode begins in the middle and ends in the last state, with reward 1.

    A rollout alternates state tokens and one action token each. Under the best policy the value of a state is the
    discount to the power of the turns after the next one.
    """

    def __init__(self, small, count=24):
        self.small, self.count, self.rng = small, count, np.random.default_rng(0)
        self._log_probs = jax.jit(self._next)

    def _next(self, params, tokens_BxT, at_B):
        positions = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
        options = transformer.ComputeOptions(packed=False)
        hidden = transformer.forward(
            params, self.small.shape, options, tokens_BxT, positions, jnp.ones_like(tokens_BxT)
        )
        logits = hidden @ transformer.unembedding(params, self.small.shape)
        chosen = jnp.take_along_axis(logits, at_B[:, None, None], axis=1)[:, 0]
        return jax.nn.log_softmax(chosen / small_model.ROLLOUT.temperature)

    def rollouts(self, params, version):
        """Samples complete episodes, of at most TURNS turns."""
        state = self.rng.integers(0, STATES - 1, self.count)
        tokens = np.zeros((self.count, 2 * TURNS), np.int32)
        made = [protocols.Trajectory(f"p{i // 4}/{i}", f"p{i // 4}", reward=0.0) for i in range(self.count)]
        done = np.zeros(self.count, bool)
        for turn in range(TURNS):
            tokens[:, 2 * turn] = state
            log_probs = np.asarray(self._log_probs(params, tokens, np.full(self.count, 2 * turn)))
            noise = self.rng.gumbel(size=log_probs.shape)
            action = np.argmax(log_probs + noise, axis=1)
            tokens[:, 2 * turn + 1] = action
            for index in np.flatnonzero(~done):
                source = protocols.TokenSource.TOOL if turn else protocols.TokenSource.PROMPT
                made[index].append_text([int(state[index])], source)
                chosen, chance = int(action[index]), float(log_probs[index, action[index]])
                made[index].append_sampled(protocols.TokenDelta((chosen,), (chance,), (version,)))
            state = np.clip(state + (action == RIGHT) - (action == LEFT), 0, STATES - 1)
            reached = ~done & (state == STATES - 1)
            for index in np.flatnonzero(reached):
                made[index].reward = 1.0
            done |= reached
            if done.all():
                break
        groups = tuple(
            protocols.Group(number, protocols.Task(f"p{number}", {}), version, made[4 * number : 4 * number + 4])
            for number in range(self.count // 4)
        )
        return protocols.TrainBatch(version, groups)


@pytest.mark.slow
def test_ppo_solves_a_chain_and_its_critic_knows_the_values(small, start_trainer):
    groups = _groups(
        advantage_arguments={"turn_discount": DISCOUNT, "trace_decay": 0.95},
        minibatches=2,
        epochs=2,
    )
    actor = start_trainer(
        **groups,
        steps=100,
        optimizer=config_lib.OptimizerConfig(learning_rate=5e-3),
        coordinator=config_lib.CoordinatorConfig(groups_per_step=6, group_size=4),
    )
    chain, rewards = Chain(small), []
    for version in range(45):
        batch = chain.rollouts(actor.running().learner.params, version)
        rewards.append(np.mean([item.reward for group in batch.groups for item in group.trajectories]))
        metrics = actor.train_step(batch)
    assert np.mean(rewards[:2]) < 0.6
    assert np.mean(rewards[-10:]) == 1.0
    assert metrics["critic/explained_variance"] > 0.9
    # In the first turn, before any action: each state's value under the policy that always goes right.
    critic = actor.running().critic
    known = {state: DISCOUNT ** (STATES - 2 - state) for state in range(STATES - 1)}
    lone = [protocols.Trajectory(f"s{state}", "s", reward=1.0) for state in known]
    for state, made in zip(known, lone, strict=True):
        made.append_text([state], protocols.TokenSource.PROMPT)
        made.append_sampled(protocols.TokenDelta((RIGHT,), (0.0,), (0,)))
    found = _values(actor, critic, lone)
    for (state, value), (row,) in zip(known.items(), found, strict=True):
        assert row == pytest.approx(value, abs=1e-2), state


def _values(actor, critic, trajectories):
    """The critic's values before the trained tokens of each trajectory."""
    examples = sequences_lib.examples(trajectories, 0, actor._model)
    packed = batch_lib.pack(actor._config, examples)
    values = packed.gather([np.asarray(array) for array in critic.values(packed)], [len(e.tokens_N) for e in examples])
    return [value[example.mask_N] for value, example in zip(values, examples, strict=True)]


def test_a_restored_trainer_goes_on_with_its_critic_bit_for_bit(small, start_trainer, tmp_path):
    batches = [trainer_doubles.batch(small, version, seed=version) for version in range(3)]
    whole = start_trainer(**_groups())
    whole.train_step(batches[0])
    whole.save(str(tmp_path / "state"))
    whole.wait_saved()
    for batch in batches[1:]:
        wanted = whole.train_step(batch)
    fresh = start_trainer(**_groups())
    assert fresh.restore(str(tmp_path / "state")) == 1
    for batch in batches[1:]:
        found = fresh.train_step(batch)
    assert found["critic/loss"] == wanted["critic/loss"]
    for leaves in ("learner", "critic"):
        states = [getattr(actor.running(), leaves).train_state() for actor in (fresh, whole)]
        for leaf, other in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_array_equal(leaf, other)


def test_in_the_warm_up_the_critic_learns_and_the_policy_stays(small, start_trainer):
    critic = config_lib.CriticConfig(enabled=True, learning_rate=3e-3, warmup_steps=1)
    actor = start_trainer(**_groups() | {"critic": critic})
    before = trainer_doubles.params(actor)
    moments = [np.array(leaf) for leaf in jax.tree.leaves(actor.running().learner.state.opt_state)]
    values = [np.array(leaf) for leaf in jax.tree.leaves(actor.running().critic.params)]
    metrics = actor.train_step(trainer_doubles.batch(small))
    assert actor.policy_version() == 1
    assert metrics["learning_rate"] == 0.0
    for leaf, old in zip(trainer_doubles.params(actor), before, strict=True):
        np.testing.assert_array_equal(leaf, old)
    # Not even the optimizer's count: the first real update has the size that it has without a warm-up.
    for leaf, old in zip(jax.tree.leaves(actor.running().learner.state.opt_state), moments, strict=True):
        np.testing.assert_array_equal(leaf, old)
    moved = zip(jax.tree.leaves(actor.running().critic.params), values, strict=True)
    assert any(np.any(np.asarray(leaf) != old) for leaf, old in moved)
    actor.train_step(trainer_doubles.batch(small, 1))
    assert any(np.any(leaf != old) for leaf, old in zip(trainer_doubles.params(actor), before, strict=True))


BOOTSTRAP = {
    "algorithm": config_lib.AlgorithmConfig(advantage="egae", advantage_arguments={"ignored_tokens": 2}),
    "task": config_lib.TaskConfig(cut_off="bootstrap"),
}


def _cut(batch, samples=(0, 2)):
    """The batch, in which the context cut these rollouts of each group off; their rewards are nonsense."""
    for group in batch.groups:
        for index, trajectory in enumerate(group.trajectories):
            trajectory.finish = "max_context" if index in samples else "answered"
            trajectory.reward = 99.0 if index in samples else trajectory.reward
    return batch


def test_truncated_rollouts_train_the_policy_without_reward_and_no_critic(small):
    config = small.config(**_groups() | BOOTSTRAP)
    rng, batch = np.random.default_rng(0), trainer_doubles.batch(small)

    def value(packed, extras):
        return [jnp.asarray(rng.normal(size=item.tokens.shape), jnp.float32) for item in packed.micro_batches]

    prepared = batch_lib.prepare(config, _cut(batch), small.shape, value=value)
    for number, (advantage, example) in enumerate(zip(prepared.advantages, prepared.sequences.examples, strict=True)):
        trained = np.flatnonzero(example.mask_N)
        found = advantage[trained] != 0
        assert found[:-2].all()
        assert found[-2:].any() != (number % 2 == 0), "the last two tokens of a truncated rollout have none"
    finished = sum(example.mask_N.sum() for example in prepared.sequences.examples[1::2])
    assert sum(target["mask"].sum() for target in prepared.targets) == finished
    assert max(np.abs(target["returns"][target["mask"]]).max() for target in prepared.targets) < 1.1
    assert sum(item.mask.sum() for item in prepared.packed.micro_batches) > finished


def test_the_critic_learns_the_same_on_a_mesh(small, start_trainer):
    found = []
    for sizes in ({}, {"data": 2, "tensor": 2}):
        actor = start_trainer(**_groups() | BOOTSTRAP, trainer=sizes)
        for version in range(2):
            metrics = actor.train_step(_cut(trainer_doubles.batch(small, version)))
        found.append((metrics, [np.array(leaf) for leaf in jax.tree.leaves(actor.running().critic.params)]))
    (one, leaves), (four, others) = found
    assert four["critic/loss"] == pytest.approx(one["critic/loss"], abs=1e-5)
    for leaf, other in zip(leaves, others, strict=True):
        np.testing.assert_allclose(other, leaf, atol=1e-4)


def test_a_discount_between_turns_counts_turns_and_not_tokens():
    mask = jnp.array([[1, 1, 0, 1, 1, 0, 0, 1]])
    rewards = jnp.array([[0, 0, 0, 0, 0, 0, 0, 1.0]])
    found, returns = advantages.gae(rewards, jnp.zeros((1, 8)), mask, turn_discount=0.5)
    np.testing.assert_allclose(found, [[0.25, 0.25, 0, 0.5, 0.5, 0, 0, 1.0]])
    np.testing.assert_allclose(returns, found)


def test_of_equal_returns_no_variance_is_explained():
    means = {"value": 999.0, "squared_error": 1.0, "clip_fraction": 0.0, "return": 1000.0}
    means["return_squared"] = float(np.nextafter(np.float32(1e6), np.float32(np.inf)))
    taken = dict.fromkeys(("loss", "grad_norm", "skipped", "learning_rate"), 0.0)
    assert "critic/explained_variance" not in critic_lib.report(taken | means)
    means["return_squared"] = 1e6 + 100.0
    assert critic_lib.report(taken | means)["critic/explained_variance"] == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"task": {"cut_off": "bootstrap"}}, r"task.cut_off: bootstrap needs .* is gae; set that to egae"),
        ({"algorithm": {"advantage": "egae"}}, r"advantage: egae is for .* set task.cut_off=bootstrap .* or take gae"),
        (
            {"algorithm": {"advantage": "egae"}, "task": {"cut_off": "bootstrap", "cut_off_limits": ()}},
            r"task.cut_off_limits: must name the limits",
        ),
        ({"critic": {"enabled": False}}, r"critic.enabled: algorithm.advantage=gae needs the values of a critic"),
        ({"algorithm": {"advantage": "grpo"}}, r"critic.enabled: True has no effect with algorithm.advantage=grpo"),
        (
            {"elastic": {"hybrid": 1}, "rollout": {"tensor_parallel": (1, 1)}},
            r"critic does not work with elastic.hybrid",
        ),
        ({"model": {"lora": {"rank": 2}}}, r"critic does not work with model.lora.rank"),
        ({"critic": {"enabled": True, "warmup_steps": 100}}, r"critic.warmup_steps: 100 leaves the policy no step"),
    ],
)
def test_what_a_critic_cannot_work_with_is_refused_by_name(groups, sentence):
    values = {"algorithm": {"advantage": "gae"}, "critic": {"enabled": True}, **groups}
    with pytest.raises(protocols.ConfigError, match=sentence):
        config_lib.parse(config_lib.RunConfig, values)
