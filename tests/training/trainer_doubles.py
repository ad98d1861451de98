"""What the small model's trainer is given in tests, what it holds, and what it compiles."""

import contextlib

import jax
import numpy as np
from jax import monitoring

from libra_jax import protocols


def attempt(group, index, rng, vocabulary, version=0, reward=None):
    """A prompt and two turns with a tool return between them; rewarded by chance."""
    made = protocols.Trajectory(trajectory_id=f"p{group}/{index}", prompt_id=f"p{group}")
    made.append_text(rng.integers(0, vocabulary, 3).tolist(), protocols.TokenSource.PROMPT)
    for turn in range(2):
        count = int(rng.integers(2, 6))
        made.append_sampled(
            protocols.TokenDelta(
                token_ids=tuple(rng.integers(0, vocabulary, count).tolist()),
                log_probs=tuple(rng.normal(-np.log(vocabulary), 0.05, count).tolist()),
                policy_versions=(version,) * count,
            )
        )
        if turn == 0:
            made.append_text(rng.integers(0, vocabulary, 2).tolist(), protocols.TokenSource.TOOL)
    made.reward = float(rng.random() < 0.5) if reward is None else reward
    return made


def batch(small, version=0, seed=0, sampled_by=None):
    """Three groups of four attempts."""
    rng = np.random.default_rng(seed)
    sampled_by = version if sampled_by is None else sampled_by
    groups = tuple(
        protocols.Group(
            group_id=number,
            task=protocols.Task(f"p{number}", {}),
            dispatch_version=sampled_by,
            trajectories=[attempt(number, index, rng, small.vocabulary, sampled_by) for index in range(4)],
        )
        for number in range(3)
    )
    return protocols.TrainBatch(version, groups)


def params(actor):
    """Copies of the actor's parameters."""
    return [np.array(leaf) for leaf in jax.tree.leaves(actor.running().learner.params)]


@contextlib.contextmanager
def compilations():
    """What XLA compiles meanwhile."""
    seen = []

    def listen(name, seconds, **details):
        if "backend_compile" in name:
            seen.append((details.get("fun_name", ""), seconds))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        monitoring.unregister_event_duration_listener(listen)
