"""What a core and its hybrid workers are given in tests, and what is looked at in a core."""

import asyncio
import dataclasses
import socket
import time

import jax
import numpy as np
import small_model

from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.training import shares, step


def attempt(name, rng, version):
    """A prompt of three tokens and one turn, rewarded for even tokens: there is something to learn."""
    made = protocols.Trajectory(trajectory_id=name, prompt_id=name.split("/")[0])
    made.append_text(rng.integers(0, 16, 3).tolist(), protocols.TokenSource.PROMPT)
    count = int(rng.integers(4, 20))
    log_probs = tuple(rng.normal(-np.log(16), 0.2, count).tolist())
    tokens = tuple(rng.integers(0, 16, count).tolist())
    made.append_sampled(protocols.TokenDelta(tokens, log_probs, (version,) * count))
    made.reward = float(np.mean(np.array(tokens) % 2 == 0))
    return made


def batch(version):
    """Six groups of four attempts."""
    rng = np.random.default_rng(version)
    groups = tuple(
        protocols.Group(
            group_id=number,
            task=protocols.Task(f"p{number}", {}),
            dispatch_version=version,
            trajectories=[attempt(f"p{number}/{index}", rng, version) for index in range(4)],
        )
        for number in range(6)
    )
    return protocols.TrainBatch(version, groups)


def share(generation=1, fraction=0.4, worker="r"):
    return protocols.Share(worker, generation, fraction)


def publish(core, version, remote=None):
    """Publishes a version, to a training side or to no one."""
    count = core.open_weights(version)
    chunks = [core.stage_weights(version, index) for index in range(count)]
    if remote is not None:
        remote("start_weight_update", version)
        for chunk in chunks:
            remote("update_weights", chunk)
        remote("finish_weight_update", version)
    core.close_weights(version)


def admit(core, remote, generation):
    """Lets the training side join the core; returns where they meet."""
    address = asyncio.run(core.listen("r", generation))
    asyncio.run(core.connect("r", generation, address))
    remote("join", generation, address)
    return address


def params(core):
    """Copies of the core's parameters."""
    return [np.array(leaf) for leaf in jax.tree.leaves(core.running().learner.params)]


def assert_equal_params(core, alone):
    for leaf, wanted in zip(params(core), params(alone), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


def refused(address):
    """No one listens there."""
    with socket.socket() as probe:
        return probe.connect_ex((address["host"], address["port"])) != 0


def eventually(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def sums(core, config, batch, indices):
    """Sums over some micro-batches, computed by the core itself."""
    learner = core.running().learner
    prepared = batch_lib.prepare(config, batch, small_model.shape())
    made, report = learner.sums(step.POLICY, learner.params, prepared.packed, prepared.extras, indices)
    return [np.array(leaf) for leaf in jax.tree.leaves(made)], report


def ranges(config, batch, given):
    """The micro-batches of the core and of each share."""
    return shares.split(batch_lib.prepare(config, batch, small_model.shape()).work, given)


def array_kinds(core):
    """Dtype and shape of each array of a sum."""
    return [
        (str(np.dtype(leaf.dtype)), leaf.shape) for leaf in jax.tree.leaves(core.running().learner.layout.accumulator)
    ]


def hurry(monkeypatch, core, seconds):
    """Lets shares count as late after these seconds."""
    config = dataclasses.replace(core._channels.config, late_min_seconds=seconds, late_factor=1e-6)
    monkeypatch.setattr(core._channels, "config", config)
